"""What a recipe may become where memory is short: it fits, nothing more is given up than must be, and it compiles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.jobs.shrink import MIN_LENGTH, describe_changes, estimated_need, smaller
from shared.program import ProgramFile, ProgramManifest
from shared.recipe import BaseRef, Recipe
from shared.training_settings import TrainingSettings
from shared.zo.lora import BaseShape, flat_size

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


def quality_key(recipe):
    """How much of each kind, the most harmful first."""
    return -recipe.sequence_length, -recipe.queries, -recipe.effective_batch, recipe.precision != "fp32"


def test_what_never_fits_has_no_smaller_recipe():
    assert smaller(manifest(), NEEDED, WEIGHTS // 5) is None
    assert smaller(manifest(), NEEDED, 0) is None


def test_weights_go_first_since_they_are_the_most_and_the_gradient_stays():
    recipe = smaller(manifest(), NEEDED, 250_000_000)
    assert recipe == manifest().recipe.model_copy(update={"precision": "int8-weight"})
    settings = TrainingSettings()
    assert settings.eps_for(recipe) == settings.eps_for(manifest().recipe)


def test_activations_go_by_examples_before_directions():
    program = manifest(weights=10_000_000, planned=800_000_000)
    recipe = smaller(program, 810_000_000, 460_000_000)
    assert (recipe.effective_batch, recipe.queries, recipe.sequence_length) == (2, 4, 64)
    recipe = smaller(program, 810_000_000, 95_000_000)
    assert (recipe.effective_batch, recipe.queries, recipe.sequence_length) == (1, 1, 64)
    assert smaller(program, 810_000_000, 80_000_000).sequence_length < 64


def test_what_the_device_counts_beside_the_program_stays():
    other_bytes = 50_000_000
    recipe = smaller(manifest(), NEEDED + other_bytes, 250_000_000)
    assert (
        estimated_need(manifest(), recipe, NEEDED + other_bytes)
        == estimated_need(manifest(), recipe, NEEDED) + other_bytes
    )
    assert estimated_need(manifest(), manifest().recipe, NEEDED + other_bytes) == NEEDED + other_bytes


@pytest.mark.parametrize("backend", ["portable", "torch", "vulkan", "qnn"])
def test_backends_without_kernels_for_fewer_bits_keep_the_precision(backend):
    assert smaller(manifest(backend=backend), NEEDED, 250_000_000) is None
    recipe = smaller(manifest(backend=backend), NEEDED, NEEDED - 5_000_000)
    assert (recipe.precision, recipe.effective_batch) == ("fp32", 2)


@pytest.mark.parametrize("precision", ["int8", "int8-weight"])
def test_eight_bits_are_not_taken_for_fewer(precision):
    recipe = smaller(manifest(weights=135_000_000, precision=precision), 212_000_000, 190_000_000)
    assert recipe.precision == precision


def test_scoring_keeps_the_rows_it_takes_at_once():
    program = manifest(weights=1, planned=800_000_000, choices=10, answer_length=3)
    for available in range(50_000_000, 800_000_000, 25_000_000):
        recipe = smaller(program, 800_000_001, available, least_rows=10)
        assert recipe is None or recipe.score_rows >= 10
    assert smaller(program, 800_000_001, 90_000_000).score_rows < 10


def test_a_runtime_that_plans_nothing_shrinks_by_its_weights():
    program = manifest(planned=0)
    assert smaller(program, WEIGHTS, WEIGHTS // 3).precision == "int8-weight"
    assert smaller(manifest(planned=0, backend="torch"), WEIGHTS, WEIGHTS - 1) is None


def shrink_steps(program):
    """What the recipe becomes as the memory falls, each recipe once."""
    recipes = {}
    for available in range(program.training_bytes - 1, 0, -1_000_000):
        recipe = smaller(program, program.training_bytes, available)
        if recipe is not None:
            assert estimated_need(program, recipe, program.training_bytes) <= available
            recipes.setdefault(recipe.id, recipe)
    return list(recipes.values())


def test_perturbed_answers_keep_two_directions_to_compare():
    program = manifest(perturbed="answers", queries=8, layers="last:8", rank=1, planned=120_000_000)
    recipes = shrink_steps(program)
    assert min(recipe.queries for recipe in recipes) == 2
    assert [Recipe.model_validate(recipe.model_dump()) for recipe in recipes] == recipes


@pytest.mark.parametrize("estimator", ["gradient", "directional"])
def test_exact_gradients_go_by_micro_batches_then_to_replay_before_bits_go(estimator):
    program = manifest(estimator=estimator, effective_batch=8, layers="last:8", rank=1, planned=120_000_000)
    recipes = shrink_steps(program)
    matching_recipes = [recipe for recipe in recipes if recipe.estimator == estimator]
    assert [recipe.micro_batch for recipe in matching_recipes] == [4, 2, 1]
    assert recipes[:3] == matching_recipes
    assert all(recipe.effective_batch == 8 and recipe.precision == "fp32" for recipe in matching_recipes)
    without = recipes[3]
    assert (without.estimator, without.precision, without.micro_batch) == ("replay", "fp32", None)
    assert {recipe.estimator for recipe in recipes[3:]} == {"replay"}
    assert recipes[-1].precision == "int8-weight"
    assert all(Recipe.model_validate(recipe.model_dump()) == recipe for recipe in recipes)
    assert describe_changes(program.recipe, matching_recipes[0]) == "micro-batch None -> 4"
    assert describe_changes(program.recipe, without).startswith(f"estimator {estimator} -> replay, ")


def test_a_micro_batch_keeps_the_rows_that_scoring_takes():
    program = manifest(estimator="gradient", effective_batch=8, choices=4, answer_length=2, rank=1)
    recipe = smaller(program, program.training_bytes, program.training_bytes - 1, least_rows=4)
    assert (recipe.estimator, recipe.micro_batch) == ("gradient", 4)
    recipe = smaller(program, program.training_bytes, estimated_need(program, recipe, program.training_bytes) - 1, 4)
    assert recipe.estimator == "replay"


def test_a_reverse_pass_counts_the_weights_that_it_packs_transposed():
    replay, exact = manifest(layers="last:8"), manifest(layers="last:8", estimator="gradient")
    layer = 576 * (576 + 192 + 192 + 576 + 3 * 1536)
    assert replay.training_bytes == NEEDED
    assert exact.training_bytes == NEEDED + 8 * layer * 4
    int8 = {"layers": "last:8", "estimator": "gradient", "precision": "int8"}
    assert manifest(**int8, loss="candidates").training_bytes == NEEDED + 8 * layer
    assert manifest(**int8, loss="full").training_bytes == NEEDED + 8 * layer + 49152 * 576
    assert manifest(layers="last:8", estimator="gradient", backend="portable").training_bytes == NEEDED


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
def test_whatever_is_found_fits_compiles_and_differs_only_where_it_may(
    settings, weights, planned, other_bytes, available
):
    program = manifest(weights=weights, planned=planned, **settings)
    before = program.recipe
    recipe = smaller(program, weights + planned + other_bytes, available)
    if recipe is None:
        return
    assert recipe != before
    assert estimated_need(program, recipe, weights + planned + other_bytes) <= available
    assert Recipe.model_validate(recipe.model_dump()) == recipe
    changeable_fields = {"precision", "effective_batch", "queries", "sequence_length"}
    assert recipe.model_dump(exclude=changeable_fields) == before.model_dump(exclude=changeable_fields)
    assert 1 <= recipe.effective_batch <= before.effective_batch
    assert 1 <= recipe.queries <= before.queries
    assert min(before.sequence_length, max(MIN_LENGTH, 2 * before.answer_length)) <= recipe.sequence_length
    assert recipe.sequence_length <= before.sequence_length
    assert describe_changes(before, recipe)


@given(recipes, sizes, sizes, sizes, sizes)
def test_more_memory_never_costs_more(settings, weights, planned, first, second):
    program = manifest(weights=weights, planned=planned, **settings)
    less, more = sorted((first, second))
    with_less = smaller(program, weights + planned, less)
    with_more = smaller(program, weights + planned, more)
    if with_less is not None:
        assert with_more is not None
        assert quality_key(with_more) <= quality_key(with_less)
