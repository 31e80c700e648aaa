"""A smaller recipe for a device that cannot hold a program. Pure arithmetic; knows no database and no device."""

from __future__ import annotations

from collections.abc import Iterator

from shared.program import ProgramManifest
from shared.recipe import Precision, Recipe

LEAST_LENGTH = 32  # tokens; a shorter prompt says too little to learn from

# Fewer bits that keep eps and nearly the gradient: correlation 0.99 with fp32's at fp32's own eps (ADR 7). int8 would
# need another eps than the job was given, and has the same weights file.
_FEWER_BITS: dict[Precision, Precision] = {"fp32": "int8-weight"}
_QUARTER = 0.26  # of float32 weights: 8-bit values, and their scales

FLOAT_BYTES = 4


def smaller(manifest: ProgramManifest, needed_bytes: int, available_bytes: int, least_rows: int = 1) -> Recipe | None:
    """The recipe nearest to `manifest`'s whose estimated need fits in `available_bytes`; None if there is none.

    needed_bytes: what the device counted for `manifest`. least_rows: sequences that scoring takes at once, at most 2qE.
    What is given up, the least harmful first, each only where what stands before it does not suffice:

    1. fp32 weights for 8-bit ones: the projected gradient stays nearly the same, and a step costs the same time.
    2. E, halved down to 1: a step's gradient has more of the examples' noise.
    3. q, halved down to 1: it has more of both noises, the examples' and the directions', whose share is the larger.
    4. Sequence length, by quarters, not under LEAST_LENGTH or twice the answer: long prompts lose their beginning.

    A step goes along the mean over q directions and E examples, so lr means what it did: the expected step is the same,
    it only varies more, which more steps make up for.
    """
    for recipe in _choices(manifest.recipe):
        fits = estimated_need(manifest, recipe, needed_bytes) <= available_bytes
        if recipe != manifest.recipe and recipe.score_rows >= least_rows and fits:
            return recipe
    return None


def estimated_need(manifest: ProgramManifest, recipe: Recipe, needed_bytes: int) -> int:
    """Bytes that `recipe` takes where `manifest`'s program takes `needed_bytes`; the two differ as `smaller` changes.

    Weights go with precision, noise with q, activations with q E S; what the device counts beside them stays. Measured
    on compiled programs it is 15 % off at most; a device that finds more than was estimated declines again.
    """
    weights, planned = manifest.file("weights").size, manifest.planned_bytes
    noise = min(_noise_bytes(manifest.recipe, manifest.size), planned)
    beside = max(needed_bytes - weights - planned, 0)
    if recipe.precision != manifest.recipe.precision:
        weights = round(weights * _QUARTER)
    smaller_noise = noise * _noise_bytes(recipe, manifest.size) // _noise_bytes(manifest.recipe, manifest.size)
    activations = (planned - noise) * _tokens(recipe) // _tokens(manifest.recipe)
    return beside + weights + smaller_noise + activations


def described(before: Recipe, after: Recipe) -> str:
    """What changes, for people."""
    names = {
        "precision": "precision",
        "effective_batch": "E",
        "queries": "q",
        "sequence_length": "sequence length",
    }
    return ", ".join(
        f"{said} {getattr(before, name)} -> {getattr(after, name)}"
        for name, said in names.items()
        if getattr(before, name) != getattr(after, name)
    )


def _choices(recipe: Recipe) -> Iterator[Recipe]:
    """Every recipe that may take the place of `recipe`, the most like it first."""
    # XNNPACK alone has kernels for fewer bits.
    fewer = _FEWER_BITS.get(recipe.precision) if recipe.backend == "xnnpack" else None
    for length in _lengths(recipe):
        for queries in _halves(recipe.queries):
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


def _halves(number: int) -> Iterator[int]:
    while number >= 1:
        yield number
        number //= 2


def _lengths(recipe: Recipe) -> Iterator[int]:
    length = recipe.sequence_length
    yield length
    least = max(LEAST_LENGTH, 2 * recipe.answer_length)
    while (length := length * 3 // 4) >= least:
        yield length


def _tokens(recipe: Recipe) -> int:
    """Tokens that a step runs, over all paths."""
    return recipe.score_rows * recipe.sequence_length


def _noise_bytes(recipe: Recipe, size: int) -> int:
    """What the methods plan for B, its paths and their noise, bytes; size: D. Counted on compiled programs."""
    by_query = 5 if recipe.estimator == "replay" else 28  # `stored` keeps two copies a query
    return FLOAT_BYTES * size * (23 + by_query * recipe.queries)
