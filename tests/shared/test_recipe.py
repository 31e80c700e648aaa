import pytest
from pydantic import ValidationError

from shared.errors import InvalidRecipe
from shared.recipe import Recipe, RecipeSettings, resolve_layers


def test_id_does_not_depend_on_the_order_of_targets_but_on_every_field(recipe):
    assert recipe.targets == ("q_proj", "v_proj")
    reordered = Recipe.model_validate(recipe.model_dump() | {"targets": ("q_proj", "v_proj")})
    assert reordered.id == recipe.id
    others = {
        Recipe.model_validate(recipe.model_dump() | change).id
        for change in (
            *({"rank": 5}, {"loss": "candidates"}, {"noise": "gaussian"}, {"a_seed": 1}, {"queries": 3}),
            *({"estimator": "stored"}, {"precision": "int8"}, {"layers": "last:1"}),
        )
    }
    assert len(others | {recipe.id}) == 9


def test_derived_numbers(recipe):
    assert (recipe.paths, recipe.scale, recipe.score_rows) == (4, 2.0, 12)


@pytest.mark.parametrize(
    "change",
    [
        {"targets": ()},
        {"targets": ("q_proj", "q_proj")},
        {"layers": "last"},
        {"layers": "last:0"},
        {"layers": "first:1"},
        {"layers": ()},
        {"layers": (1, 1)},
        {"layers": (-1,)},
        {"noise": "randn"},
        {"noise": "operator"},
    ],
)
def test_bad_settings_are_refused(change):
    with pytest.raises(ValidationError):
        RecipeSettings.model_validate(change)


@pytest.mark.parametrize(
    ("layers", "adapted", "canonical"),
    [
        ("all", (0, 1, 2, 3, 4), "all"),
        ("last:5", (0, 1, 2, 3, 4), "all"),
        ("last:2", (3, 4), "last:2"),
        ("last:25%", (3, 4), "last:2"),  # 1.25, rounded up
        ("last:1%", (4,), "last:1"),
        ("last:100%", (0, 1, 2, 3, 4), "all"),
        ([4, 3], (3, 4), "last:2"),
        ([4, 1], (1, 4), (1, 4)),
        ([0, 1, 2, 3, 4], (0, 1, 2, 3, 4), "all"),
        ([0], (0,), (0,)),
    ],
)
def test_layers_of_five(recipe, layers, adapted, canonical):
    changed = Recipe.model_validate(recipe.model_dump() | {"layers": layers})
    assert changed.adapted_layers(5) == adapted
    assert changed.frozen_layers(5) == adapted[0]
    resolved = resolve_layers(changed.layers, 5)
    assert resolved == canonical
    assert changed.model_copy(update={"layers": resolved}).adapted_layers(5) == adapted


@pytest.mark.parametrize("layers", ["last:6", "last:101%", [5], [0, 5]])
def test_layers_that_five_do_not_have(recipe, layers):
    changed = Recipe.model_validate(recipe.model_dump() | {"layers": layers})
    with pytest.raises(InvalidRecipe, match="layers"):
        changed.adapted_layers(5)
    with pytest.raises(InvalidRecipe, match="layers"):
        resolve_layers(changed.layers, 5)


@pytest.mark.parametrize("backend", ["torch", "qnn", "vulkan"])
def test_the_noise_operator_is_for_the_native_runner(backend):
    with pytest.raises(ValidationError, match=f"backend {backend} use 'gaussian'"):
        RecipeSettings(noise="operator", estimator="stored", backend=backend)


def test_documents_from_before_a_setting_existed_are_read(recipe):
    old = recipe.model_dump(mode="json")
    for name in ("layers", "estimator", "precision", "backend", "noise"):
        del old[name]
    assert Recipe.model_validate(old).id == recipe.id


def test_recipes_of_exact_gradients_say_what_they_add(recipe):
    assert "optimizer" not in recipe.model_dump(mode="json")
    fields = recipe.model_dump(exclude={"queries"}) | {"estimator": "gradient"}
    exact = Recipe.model_validate(fields)
    assert (exact.queries, exact.paths, exact.score_rows) == (1, 1, exact.effective_batch)
    assert "optimizer" not in exact.model_dump(mode="json")
    assert Recipe.model_validate(fields | {"optimizer": "sgd"}).id != exact.id
    assert Recipe.model_validate_json(exact.model_dump_json()) == exact


def test_recipes_that_perturb_answers_alone_say_so(recipe):
    answers = Recipe.model_validate(recipe.model_dump(exclude={"queries"}) | {"perturbed": "answers"})
    assert (answers.queries, answers.answer_paths, answers.paths, answers.score_rows) == (512, 512, 1, answers.rows)
    assert "perturbed" in answers.model_dump()
    assert "perturbed" not in recipe.model_dump()
    assert answers.id != recipe.model_copy(update={"queries": 512}).id


def test_recipes_of_directional_gradients_say_what_they_add(recipe):
    fields = recipe.model_dump(exclude={"queries"}) | {"estimator": "directional", "effective_batch": 6}
    directional = Recipe.model_validate(fields)
    assert (directional.queries, directional.paths, directional.rows, directional.score_rows) == (256, 1, 6, 6)
    assert {"micro_batch", "optimizer"}.isdisjoint(directional.model_dump(mode="json"))
    assert directional.keeps_optimizer
    assert not Recipe.model_validate(fields | {"optimizer": "sgd"}).keeps_optimizer
    private = Recipe.model_validate(fields | {"privacy": "clipped"})
    assert not private.keeps_optimizer
    assert Recipe.model_validate(private.model_dump(mode="json")) == private
    parts = Recipe.model_validate(fields | {"micro_batch": 2, "queries": 64})
    assert (parts.queries, parts.rows, parts.score_rows) == (64, 2, 2)
    assert parts.id != directional.id
    assert Recipe.model_validate_json(parts.model_dump_json()) == parts


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"estimator": "gradient", "backend": "qnn"}, "backend qnn has no reverse pass"),
        ({"estimator": "gradient", "backend": "vulkan"}, "estimator 'replay' needs none"),
        ({"estimator": "gradient", "precision": "int4-weight"}, "multiplied transposed"),
        ({"estimator": "gradient", "queries": 4}, "has no directions"),
        ({"estimator": "gradient", "noise": "gaussian"}, "has no directions"),
        ({"estimator": "stored", "privacy": "clipped"}, "requires estimator 'gradient', 'directional' or 'replay'"),
        ({"estimator": "gradient", "optimizer": "lion"}, "'sgd', 'momentum' or 'adam'"),
        ({"optimizer": "sgd"}, "needs estimator 'gradient' or 'directional'"),
        ({"estimator": "directional", "privacy": "clipped", "optimizer": "adam"}, "projections are the update; omit"),
        ({"estimator": "directional", "noise": "gaussian"}, "replayed bit for bit; omit noise"),
        ({"estimator": "directional", "backend": "qnn"}, "which estimator 'directional' needs"),
        ({"estimator": "directional", "precision": "int4-weight"}, "use int4 or int8, or estimator 'replay'"),
        ({"estimator": "directional", "queries": 513}, "less than or equal to 512"),
        (
            {"queries": 65},
            "at most 64 queries; estimator 'directional', and 'replay' with perturbed 'answers', have up",
        ),
        ({"perturbed": "answers", "estimator": "gradient"}, "needs estimator 'replay', not 'gradient'"),
        ({"perturbed": "answers", "backend": "portable"}, "needs backend xnnpack; with portable, use perturbed 'all'"),
        ({"perturbed": "answers", "privacy": "clipped"}, "use perturbed 'all', or another estimator"),
        ({"perturbed": "answers", "queries": 1}, "needs at least 2 queries"),
        ({"estimator": "stored", "queries": 65}, "estimator 'stored' runs 2q paths at once"),
        ({"micro_batch": 2}, "estimator 'replay' has no micro_batch"),
        ({"estimator": "gradient", "micro_batch": 3}, "no.* proper divisor of effective_batch 4"),
        ({"estimator": "gradient", "micro_batch": 4}, "omit it to compute all examples at once"),
        ({"loss": "dpo", "effective_batch": 3}, "make effective_batch and micro_batch even"),
        ({"loss": "kto", "estimator": "gradient", "effective_batch": 6, "micro_batch": 3}, "micro_batch even"),
        ({"loss": "dpo", "privacy": "clipped"}, "loss 'dpo' has no privacy 'clipped'"),
    ],
)
def test_settings_without_a_reverse_pass_are_rejected_with_the_remedy(settings, refusal):
    with pytest.raises(ValidationError, match=refusal):
        RecipeSettings(**settings)
