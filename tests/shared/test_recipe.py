import hashlib
import json

import pytest
from pydantic import ValidationError

from shared.recipe import Recipe, RecipeSettings


def test_id_is_the_sha256_of_sorted_compact_json(recipe):
    fields = json.loads(recipe.model_dump_json())
    fields["alpha"] = 8  # RFC 8785 writes 8.0 as 8
    compact = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    assert recipe.id == hashlib.sha256(compact).hexdigest()


def test_id_does_not_depend_on_the_order_of_targets_but_on_every_field(recipe):
    assert recipe.targets == ("q_proj", "v_proj")
    again = Recipe.model_validate(recipe.model_dump() | {"targets": ("q_proj", "v_proj")})
    assert again.id == recipe.id
    others = {
        Recipe.model_validate(recipe.model_dump() | change).id
        for change in ({"rank": 5}, {"loss": "candidates"}, {"noise": "gaussian"}, {"a_seed": 1}, {"queries": 3})
    }
    assert len(others | {recipe.id}) == 6


def test_derived_numbers(recipe):
    assert (recipe.paths, recipe.scale, recipe.score_rows) == (4, 2.0, 12)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 0},
        {"targets": ()},
        {"targets": ("q_proj", "q_proj")},
        {"targets": ("lm_head",)},
        {"queries": 0},
        {"alpha": float("nan")},
        {"precision": "int8"},
        {"unknown": 1},
    ],
)
def test_bad_settings_are_refused(change):
    with pytest.raises(ValidationError):
        RecipeSettings.model_validate(change)
