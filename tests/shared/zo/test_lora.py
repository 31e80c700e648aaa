import numpy as np
import pytest
import torch

from shared.zo.lora import (
    a_fingerprint,
    flat_size,
    init_a,
    lora_modules,
)


def test_layout_is_layer_by_layer_in_canonical_target_order(recipe, shape):
    modules = lora_modules(recipe, shape)
    assert [module.name for module in modules] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
    ]
    assert [module.offset for module in modules] == [0, 128, 192, 320]
    assert flat_size(recipe, shape) == 2 * 4 * (32 + 16)
    flat = np.arange(384, dtype=np.float32)
    assert np.array_equal(modules[1].b(flat), flat[128:192].reshape(4, 16))


def test_a_is_kaiming_uniform_with_a_sqrt_5(recipe, shape):
    """torch's own initializer has the same bounds and variance (the paper's reference code uses it)."""
    module = lora_modules(recipe, shape)[0]
    ours = np.concatenate([init_a(recipe.model_copy(update={"a_seed": seed}), module).ravel() for seed in range(100)])
    theirs = torch.nn.init.kaiming_uniform_(torch.empty(4096, 32), a=5**0.5).numpy()
    assert np.abs(ours).max() == pytest.approx(np.abs(theirs).max(), rel=0.01)
    assert ours.var() == pytest.approx(theirs.var(), rel=0.05)


def test_a_fingerprint_pins_seed_rank_and_targets_only(recipe, shape):
    same = recipe.model_copy(update={"queries": 8, "loss": "candidates", "alpha": 1.0})
    assert a_fingerprint(same, shape) == a_fingerprint(recipe, shape)
    others = [recipe.model_copy(update=change) for change in ({"a_seed": 1}, {"rank": 8}, {"targets": ("q_proj",)})]
    assert len({a_fingerprint(other, shape) for other in [recipe, *others]}) == 4
