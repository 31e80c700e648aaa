"""Finds a smaller recipe for a device whose memory is too small for a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from server.jobs.memory import QUARTER, answer_tokens, planned_bytes, vector_bytes
from shared.program import ProgramManifest, transposed_bytes
from shared.recipe import DEFAULT_QUERIES, REVERSE_ESTIMATORS, Estimator, Precision, Recipe

MIN_LENGTH = 32  # tokens; shorter prompts contain too little to learn from

# The precision with fewer bits that keeps eps and nearly keeps the gradient: correlation 0.99 with fp32's at fp32's eps
# (ADR 28). int8 would need a different eps, and its weights file is equally large.
_FEWER_BITS: dict[Precision, Precision] = {"fp32": "int8-weight"}

_ZEROTH_ORDER = {"estimator": "replay", "queries": DEFAULT_QUERIES["replay"], "optimizer": "adam", "micro_batch": None}


def smaller(manifest: ProgramManifest, needed_bytes: int, available_bytes: int, least_rows: int = 1) -> Recipe | None:
    """Returns the recipe nearest to `manifest`'s whose estimated memory fits in `available_bytes`; None if none fits.

    needed_bytes: the device's own count for `manifest`. least_rows: sequences that are scored at once, at most 2qE.
    A recipe with exact gradients first computes fewer examples at once, which does not change its gradient. If the
    smallest micro-batch does not suffice, its estimator becomes `replay`, without a reverse pass. A private one keeps
    its estimator, because `privacy.clip` would bound another quantity.
    Reductions, the least harmful first; each is applied only if those before it do not suffice:

    1. 8-bit weights instead of fp32: the projected gradient stays nearly the same, and a step takes the same time.
    2. E, halved down to 1: a step's gradient gets more noise from the examples.
    3. q, halved down to 1: the gradient gets more noise from the examples and, mostly, from the directions.
    4. Sequence length, reduced by quarters, to no less than MIN_LENGTH or twice the answer: long prompts lose their
       beginning.

    A step is the mean over q directions and E examples, so the same lr still fits: the expected step is unchanged, and
    only its variance grows, which more steps compensate.
    """
    return _first(_choices(manifest.recipe), manifest, needed_bytes, available_bytes, least_rows)


def lighter(
    manifest: ProgramManifest,
    needed_bytes: int,
    available_bytes: int,
    estimators: Sequence[Estimator],
    least_rows: int = 1,
) -> Recipe | None:
    """Returns the recipe nearest to `manifest`'s that fits and learns from as many examples and as precise weights.

    It has a smaller micro-batch, or estimator `replay`. estimators: those that may serve the job. See `smaller`.
    """
    choices = (recipe for recipe in _estimators(manifest.recipe) if recipe.estimator in estimators)
    return _first(choices, manifest, needed_bytes, available_bytes, least_rows)


def _first(
    choices: Iterator[Recipe], manifest: ProgramManifest, needed_bytes: int, available_bytes: int, least_rows: int
) -> Recipe | None:
    """Returns the first choice that differs from `manifest`'s recipe, fits, and scores as many rows as needed."""
    for recipe in choices:
        fits = estimated_need(manifest, recipe, needed_bytes) <= available_bytes
        if recipe != manifest.recipe and recipe.score_rows >= least_rows and fits:
            return recipe
    return None


def estimated_need(manifest: ProgramManifest, recipe: Recipe, needed_bytes: int) -> int:
    """Estimates the memory of `recipe`, bytes, given that `manifest`'s program needs `needed_bytes`.

    The recipes differ only in what `smaller` changes. Weights scale with precision, noise with q, activations with the
    sequences that run at once and their length; everything else that the device counts stays the same. The error
    measured on compiled programs of estimators `replay` and `stored` is at most 15 %; a device that needs more than was
    estimated declines again.
    """
    weights = manifest.file("weights").size
    beside = max(needed_bytes - manifest.training_bytes, 0)
    if recipe.precision != manifest.recipe.precision:
        weights = round(weights * QUARTER)
    return beside + weights + _planned(manifest, recipe) + transposed_bytes(recipe, manifest.shape)


def _planned(manifest: ProgramManifest, recipe: Recipe) -> int:
    """Returns the planned memory of `recipe`, bytes; 0 if the runtime plans none for `manifest`'s program."""
    before, planned, size = manifest.recipe, manifest.planned_bytes, manifest.size
    if recipe.estimator != before.estimator and planned:
        return planned_bytes(recipe, manifest.shape)
    noise = min(vector_bytes(before, size), planned)
    activations = (planned - noise) * _tokens(recipe) // _tokens(before)
    return noise * vector_bytes(recipe, size) // vector_bytes(before, size) + activations


def describe_changes(before: Recipe, after: Recipe) -> str:
    """Returns the differences as text."""
    names = {
        "estimator": "estimator",
        "precision": "precision",
        "effective_batch": "E",
        "micro_batch": "micro-batch",
        "queries": "q",
        "sequence_length": "sequence length",
    }
    return ", ".join(
        f"{label} {getattr(before, name)} -> {getattr(after, name)}"
        for name, label in names.items()
        if getattr(before, name) != getattr(after, name)
    )


def _choices(recipe: Recipe) -> Iterator[Recipe]:
    """Yields every recipe that may replace `recipe`, the most similar first."""
    yield from _estimators(recipe)
    if recipe.estimator in REVERSE_ESTIMATORS:
        if recipe.privacy == "clipped":
            return
        recipe = recipe.model_copy(update=_ZEROTH_ORDER)
    # Only XNNPACK has kernels for fewer bits.
    fewer = _FEWER_BITS.get(recipe.precision) if recipe.backend == "xnnpack" else None
    for length in _lengths(recipe):
        for queries in _halves(recipe.queries, least=2 if recipe.perturbed == "answers" else 1):
            for batch in _halves(recipe.effective_batch):
                for precision in (recipe.precision, fewer):
                    if precision is not None:
                        yield recipe.model_copy(
                            update={
                                "sequence_length": length,
                                "queries": queries,
                                "effective_batch": batch,
                                "precision": precision,
                            }
                        )


def _estimators(recipe: Recipe) -> Iterator[Recipe]:
    """Yields `recipe` with each smaller micro-batch, then without a reverse pass unless it is private.

    Yields nothing if it has no reverse pass.
    """
    if recipe.estimator in REVERSE_ESTIMATORS:
        for rows in range(recipe.rows - 1, 0, -1):
            if recipe.effective_batch % rows == 0:
                yield recipe.model_copy(update={"micro_batch": rows})
        if recipe.privacy == "none":
            yield recipe.model_copy(update=_ZEROTH_ORDER)


def _halves(number: int, least: int = 1) -> Iterator[int]:
    while number >= least:
        yield number
        number //= 2


def _lengths(recipe: Recipe) -> Iterator[int]:
    length = recipe.sequence_length
    yield length
    least = max(MIN_LENGTH, 2 * recipe.answer_length)
    while (length := length * 3 // 4) >= least:
        yield length


def _tokens(recipe: Recipe) -> int:
    """Returns the number of tokens in a step, over all paths."""
    return recipe.score_rows * recipe.sequence_length + answer_tokens(recipe)
