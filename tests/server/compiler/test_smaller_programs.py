"""The memory that a smaller recipe is estimated to take, against the program that it compiles to."""

import pytest

from server.jobs.shrink import estimated_need, smaller
from tests.programs import shared_store
from tests.server.compiler.conftest import make_tiny


def device_bytes(manifest):
    """What a device counts, bytes."""
    return manifest.file("weights").size + manifest.planned_bytes


@pytest.mark.slow
def test_what_was_estimated_is_near_what_was_compiled(tmp_path):
    base = make_tiny(tmp_path / "base", hidden_size=64, intermediate_size=128)
    recipe = base.recipe(rank=8, queries=4, effective_batch=4, sequence_length=64)
    before = shared_store().put(recipe, base.directory, tmp_path / "before")
    smaller_recipe = smaller(before, device_bytes(before), device_bytes(before) // 3)
    changed_fields = {
        name for name in type(smaller_recipe).model_fields if getattr(smaller_recipe, name) != getattr(recipe, name)
    }
    assert changed_fields == {"precision", "effective_batch"}
    after = shared_store().put(smaller_recipe, base.directory, tmp_path / "after")
    assert device_bytes(after) == pytest.approx(estimated_need(before, smaller_recipe, device_bytes(before)), rel=0.15)
    assert after.file("weights").size == pytest.approx(0.26 * before.file("weights").size, rel=0.1)
