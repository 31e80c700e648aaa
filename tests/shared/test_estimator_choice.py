"""The estimators that a request with estimator `auto` allows, and the reasons."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.errors import InvalidRecipe
from shared.estimator_choice import Demands, possible_estimators, settings_with
from shared.job import JobRequest
from shared.recipe import BaseRef, Recipe, RecipeSettings, RequestedRecipe
from shared.training_settings import TrainingSettings

TRAJECTORY = Demands(trajectory="the job requests a trajectory")


def possible(demands=None, **settings):
    return possible_estimators(RequestedRecipe(**settings), demands or Demands())


def test_without_restrictions_gradient_is_preferred():
    choice = possible()
    assert choice.names == ("gradient", "directional", "replay")
    assert choice.excluded == {}
    assert "exact gradients" in choice.reason


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"backend": "qnn"}, "backend qnn has no reverse pass"),
        ({"backend": "vulkan"}, "backend vulkan has no reverse pass"),
        ({"precision": "int4"}, "precision int4 has no reverse pass"),
        ({"precision": "int4-weight"}, "precision int4-weight has no reverse pass"),
        ({"privacy": "clipped"}, "privacy 'clipped', estimator gradient must be named"),
        ({"noise": "gaussian"}, "noise 'gaussian' belongs to perturbed forward passes"),
    ],
)
@pytest.mark.parametrize("demands", [Demands(), TRAJECTORY])
def test_settings_without_a_reverse_pass_select_replay(settings, cause, demands):
    choice = possible(demands, **settings)
    assert choice.names == ("replay",)
    assert cause in choice.reason


@pytest.mark.parametrize("backend", ["xnnpack", "portable", "torch"])
def test_a_required_trajectory_excludes_estimator_gradient(backend):
    choice = possible(TRAJECTORY, backend=backend)
    assert choice.names == ("directional", "replay")
    assert choice.reason == "the job requests a trajectory, which runs of estimator gradient do not have"


@pytest.mark.parametrize(
    ("settings", "demands", "names"),
    [
        ({"queries": 8}, Demands(), ("directional", "replay")),
        ({"queries": 128}, Demands(), ("directional",)),
        ({"optimizer": "sgd"}, Demands(), ("gradient", "directional")),
        ({"micro_batch": 2}, Demands(), ("gradient", "directional")),
        ({}, Demands(unused="weight_decay"), ("gradient",)),
    ],
)
def test_settings_exclude_estimators_without_them(settings, demands, names):
    assert possible(demands, **settings).names == names


@pytest.mark.parametrize(
    ("settings", "demands", "causes"),
    [
        ({"backend": "qnn", "optimizer": "momentum"}, Demands(), ("backend qnn", "optimizer 'momentum'")),
        ({"optimizer": "sgd"}, replace(TRAJECTORY, unused="max_norm"), ("requests a trajectory", "training.max_norm")),
        ({"precision": "int4"}, Demands(unused="max_norm"), ("precision int4", "training.max_norm")),
        ({"queries": 128, "backend": "vulkan"}, Demands(), ("backend vulkan", "at most 64 queries")),
        ({"privacy": "clipped", "micro_batch": 2}, Demands(), ("privacy 'clipped'", "recipe.micro_batch is 2")),
    ],
)
def test_without_a_possible_estimator_all_reasons_are_given(settings, demands, causes):
    with pytest.raises(InvalidRecipe) as refused:
        possible(demands, **settings)
    for cause in causes:
        assert cause in refused.value.detail


def test_each_estimator_has_its_own_default_of_queries():
    requested = RequestedRecipe(effective_batch=8)
    assert [settings_with(requested, name).queries for name in ("gradient", "directional", "replay")] == [1, 256, 4]
    assert settings_with(RequestedRecipe(queries=8), "directional").queries == 8
    assert settings_with(requested, "gradient", 2).micro_batch == 2
    assert settings_with(RequestedRecipe(effective_batch=8, micro_batch=2), "replay").micro_batch is None


@pytest.mark.parametrize("estimator", ["replay", "stored", "gradient", "directional"])
def test_a_named_estimator_keeps_its_recipe_id(estimator):
    """A named estimator in a request resolves to the same settings as the estimator alone."""
    settings = RecipeSettings(estimator=estimator)
    requested = RequestedRecipe(estimator=estimator)
    assert settings_with(requested, estimator) == settings
    assert requested.queries == settings.queries
    other_fields = {"base": BaseRef(name="b", sha256="a" * 64), "answer_length": 1, "choices": 2}
    recipe = Recipe(**settings.model_dump() | other_fields)
    assert "auto" not in recipe.model_dump_json()
    assert Recipe(**requested.model_dump() | other_fields).id == recipe.id


def test_complete_recipes_reject_estimator_auto():
    for kind in (RecipeSettings, Recipe):
        with pytest.raises(ValidationError, match="estimator"):
            kind.model_validate({"estimator": "auto"})


def body(**changes):
    return JobRequest(base="b", user="u", adapter="a", task="sst2", dataset="d", **changes)


def test_jobs_leave_the_estimator_to_the_server():
    assert body().recipe.estimator == "auto"
    assert body(recipe={"rank": 4}).recipe.estimator == "auto"
    assert body(training=TrainingSettings(steps=3)).model_dump(exclude_unset=True).keys() >= {"training"}


def test_complete_settings_keep_their_estimator_in_a_body_without_defaults():
    """A client omits unset fields, and the server interprets an omitted estimator as `auto`."""
    request = body(recipe=RecipeSettings(rank=4))
    fields = request.model_dump(mode="json", exclude_unset=True)
    assert fields["recipe"]["estimator"] == "replay"
    assert JobRequest.model_validate(fields).recipe == request.recipe


requests = st.fixed_dictionaries(
    {
        "backend": st.sampled_from(["xnnpack", "portable", "torch", "qnn", "vulkan"]),
        "precision": st.sampled_from(["fp32", "int8", "int4", "int8-weight", "int4-weight"]),
        "noise": st.sampled_from(["rademacher", "gaussian"]),
        "privacy": st.sampled_from(["none", "clipped"]),
        "optimizer": st.sampled_from(["sgd", "momentum", "adam"]),
        "queries": st.none() | st.integers(1, 512),
        "effective_batch": st.sampled_from([1, 4, 8]),
        "micro_batch": st.none() | st.sampled_from([1, 2, 4]),
    }
)
demanded = st.builds(Demands, st.none() | st.just("a trajectory"), st.none() | st.just("weight_decay"))


@given(requests, demanded)
def test_every_possible_estimator_has_valid_settings(settings, demands):
    try:
        requested = RequestedRecipe(**settings)
    except ValidationError:
        return
    try:
        choice = possible_estimators(requested, demands)
    except InvalidRecipe:
        return
    for name in choice.names:
        resolved = settings_with(requested, name)
        assert resolved.estimator == name
        expected_fields = {"estimator", "queries"}
        assert resolved.model_dump(exclude=expected_fields) == requested.model_dump(exclude=expected_fields)
        assert requested.queries in (None, resolved.queries)
    assert choice.reason
