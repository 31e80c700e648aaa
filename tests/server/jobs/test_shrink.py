"""What a recipe may become where memory is short: it fits, nothing more is given up than must be, and it compiles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.jobs.shrink import LEAST_LENGTH, described, estimated_need, smaller
from shared.job import TrainingSettings
from shared.lora import BaseShape, flat_size
from shared.program import ProgramFile, ProgramManifest
from shared.recipe import BaseRef, Recipe

# SmolLM2-135M, and what `mobizo-server compile` wrote for q = E = 4, S = 64.
SHAPE = BaseShape(
    architecture="llama",
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocabulary=49152,
    context_length=2048,
)
WEIGHTS, PLANNED = 538_102_912, 77_955_952
NEEDED = WEIGHTS + PLANNED


def manifest(weights=WEIGHTS, planned=PLANNED, **settings):
    values = {"answer_length": 1, "choices": 2} | settings
    recipe = Recipe(base=BaseRef(name="smollm2", sha256="a" * 64), **values)
    files = tuple(
        ProgramFile(role=role, name=role, size=size, sha256="b" * 64)
        for role, size in (("program", 4_000_000), ("weights", weights), ("tokenizer", 3_000_000))
    )
    return ProgramManifest(
        recipe=recipe,
        recipe_id=recipe.id,
        shape=SHAPE,
        size=flat_size(recipe, SHAPE),
        a_sha256="c" * 64,
        score_rows=recipe.score_rows,
        files=files,
        planned_bytes=planned,
        flops_per_step=1,
        delegates=1,
        nodes=1,
        executorch="1.5.1",
    )


def given_up(recipe):
    """How much of each kind, the most harmful first."""
    return -recipe.sequence_length, -recipe.queries, -recipe.effective_batch, recipe.precision != "fp32"


def test_what_never_fits_has_no_smaller_recipe():
    assert smaller(manifest(), NEEDED, WEIGHTS // 5) is None
    assert smaller(manifest(), NEEDED, 0) is None


def test_weights_go_first_since_they_are_the_most_and_the_gradient_stays():
    found = smaller(manifest(), NEEDED, 250_000_000)
    assert found == manifest().recipe.model_copy(update={"precision": "int8-weight"})
    settings = TrainingSettings()
    assert settings.eps_for(found) == settings.eps_for(manifest().recipe)


def test_activations_go_by_examples_before_directions():
    program = manifest(weights=10_000_000, planned=800_000_000)
    found = smaller(program, 810_000_000, 460_000_000)
    assert (found.effective_batch, found.queries, found.sequence_length) == (2, 4, 64)
    found = smaller(program, 810_000_000, 95_000_000)
    assert (found.effective_batch, found.queries, found.sequence_length) == (1, 1, 64)
    assert smaller(program, 810_000_000, 80_000_000).sequence_length < 64


def test_what_the_device_counts_beside_the_program_stays():
    beside = 50_000_000
    found = smaller(manifest(), NEEDED + beside, 250_000_000)
    assert estimated_need(manifest(), found, NEEDED + beside) == estimated_need(manifest(), found, NEEDED) + beside
    assert estimated_need(manifest(), manifest().recipe, NEEDED + beside) == NEEDED + beside


@pytest.mark.parametrize("backend", ["portable", "torch", "vulkan", "qnn"])
def test_backends_without_kernels_for_fewer_bits_keep_the_precision(backend):
    assert smaller(manifest(backend=backend), NEEDED, 250_000_000) is None
    found = smaller(manifest(backend=backend), NEEDED, NEEDED - 5_000_000)
    assert (found.precision, found.effective_batch) == ("fp32", 2)


@pytest.mark.parametrize("precision", ["int8", "int8-weight"])
def test_eight_bits_are_not_taken_for_fewer(precision):
    found = smaller(manifest(weights=135_000_000, precision=precision), 212_000_000, 190_000_000)
    assert found.precision == precision


def test_scoring_keeps_the_rows_it_takes_at_once():
    program = manifest(weights=1, planned=800_000_000, choices=10, answer_length=3)
    for available in range(50_000_000, 800_000_000, 25_000_000):
        found = smaller(program, 800_000_001, available, least_rows=10)
        assert found is None or found.score_rows >= 10
    assert smaller(program, 800_000_001, 90_000_000).score_rows < 10


def test_a_runtime_that_plans_nothing_shrinks_by_its_weights():
    program = manifest(planned=0)
    assert smaller(program, WEIGHTS, WEIGHTS // 3).precision == "int8-weight"
    assert smaller(manifest(planned=0, backend="torch"), WEIGHTS, WEIGHTS - 1) is None


recipes = st.fixed_dictionaries(
    {
        "queries": st.integers(1, 16),
        "effective_batch": st.integers(1, 32),
        "sequence_length": st.integers(20, 512),
        "answer_length": st.integers(1, 12),
        "precision": st.sampled_from(["fp32", "int8", "int8-weight"]),
        "estimator": st.sampled_from(["replay", "stored"]),
        "noise": st.sampled_from(["rademacher", "gaussian"]),
    }
)
sizes = st.integers(0, 2_000_000_000)


@given(recipes, sizes, sizes, sizes, sizes)
def test_whatever_is_found_fits_compiles_and_differs_only_where_it_may(settings, weights, planned, beside, available):
    program = manifest(weights=weights, planned=planned, **settings)
    before = program.recipe
    found = smaller(program, weights + planned + beside, available)
    if found is None:
        return
    assert found != before
    assert estimated_need(program, found, weights + planned + beside) <= available
    assert Recipe.model_validate(found.model_dump()) == found
    may = {"precision", "effective_batch", "queries", "sequence_length"}
    assert found.model_dump(exclude=may) == before.model_dump(exclude=may)
    assert 1 <= found.effective_batch <= before.effective_batch
    assert 1 <= found.queries <= before.queries
    assert min(before.sequence_length, max(LEAST_LENGTH, 2 * before.answer_length)) <= found.sequence_length
    assert found.sequence_length <= before.sequence_length
    assert described(before, found)


@given(recipes, sizes, sizes, sizes, sizes)
def test_more_memory_never_costs_more(settings, weights, planned, first, second):
    program = manifest(weights=weights, planned=planned, **settings)
    less, more = sorted((first, second))
    with_less = smaller(program, weights + planned, less)
    with_more = smaller(program, weights + planned, more)
    if with_less is not None:
        assert with_more is not None
        assert given_up(with_more) <= given_up(with_less)


def test_changes_are_said_in_words():
    before = manifest().recipe
    after = before.model_copy(update={"queries": 2, "precision": "int8-weight"})
    assert described(before, after) == "precision fp32 -> int8-weight, q 4 -> 2"
