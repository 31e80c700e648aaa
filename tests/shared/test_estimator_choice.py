"""The estimators that a request with estimator `auto` allows, and the reasons."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.errors import InvalidRecipe
from shared.estimator_choice import Demands, possible_estimators, settings_with
from shared.job import JobRequest
from shared.recipe import BaseRef, Recipe, RecipeSettings, RequestedRecipe

TRAJECTORY = Demands(trajectory="the job requests a trajectory")


def possible(demands=None, **settings):
    return possible_estimators(RequestedRecipe(**settings), demands or Demands())


@pytest.mark.parametrize(
    ("settings", "demands", "names"),
    [
        ({}, Demands(), ("gradient", "directional", "replay")),
        ({}, TRAJECTORY, ("directional", "replay")),
        ({"precision": "int4"}, Demands(), ("gradient", "directional", "replay")),
        ({"precision": "int4-weight"}, Demands(), ("replay",)),
        ({"queries": 8}, Demands(), ("directional", "replay")),
        ({"queries": 128}, Demands(), ("directional",)),
        ({"optimizer": "sgd"}, Demands(), ("gradient", "directional")),
        ({"micro_batch": 2}, Demands(), ("gradient", "directional")),
        ({}, Demands(unused="weight_decay"), ("gradient",)),
    ],
)
def test_settings_exclude_estimators_without_them(settings, demands, names):
    assert possible(demands, **settings).names == names


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


def body(**changes):
    return JobRequest(base="b", user="u", adapter="a", task="sst2", dataset="d", **changes)


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
