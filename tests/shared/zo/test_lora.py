import numpy as np
import pytest
import torch
from safetensors.numpy import save

from shared.errors import InvalidRecipe, InvalidUpload
from shared.recipe import TARGETS
from shared.zo.lora import (
    HEADER_BYTES,
    a_fingerprint,
    dump_adapter,
    flat_size,
    init_a,
    load_adapter,
    lora_modules,
    named_fingerprint,
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


def test_layout_of_chosen_layers(recipe, shape):
    modules = lora_modules(recipe.model_copy(update={"layers": (1,)}), shape)
    assert [(module.layer, module.offset) for module in modules] == [(1, 0), (1, 128)]
    with pytest.raises(InvalidRecipe, match="layers names layer 2"):
        lora_modules(recipe.model_copy(update={"layers": (0, 2)}), shape)


def test_opt_has_other_names_and_no_gate(recipe, shape):
    opt = shape.model_copy(update={"architecture": "opt", "gated": False})
    targets = tuple(target for target in TARGETS if target != "gate_proj")
    modules = lora_modules(recipe.model_copy(update={"targets": targets, "layers": (1,)}), opt)
    assert [module.name.removeprefix("model.decoder.layers.1.") for module in modules] == [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
        "fc1",
        "fc2",
    ]
    with pytest.raises(InvalidRecipe, match="targets names gate_proj; a opt layer has q_proj"):
        lora_modules(recipe.model_copy(update={"targets": TARGETS}), opt)


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


def test_adapter_round_trip_and_size():
    flat = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    data = dump_adapter(flat, {"recipe_id": "a" * 64, "a_sha256": "b" * 64, "job_id": "c" * 32, "step": "12"})
    assert np.array_equal(load_adapter(data, 1000), flat)
    assert len(data) <= 4 * 1000 + HEADER_BYTES


def flat_with(value):
    flat = np.zeros(8, np.float32)
    flat[5] = value
    return flat


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (save({"lora_B": np.zeros(9, np.float32)}), r"shape \[9\]"),
        (save({"lora_B": np.zeros((2, 4), np.float32)}), r"shape \[2, 4\]"),
        (save({"lora_B": np.zeros(8, np.float16)}), "dtype F16"),
        (save({"lora_A": np.zeros(8, np.float32)}), "lora_A"),
        (save({"lora_B": np.zeros(8, np.float32), "more": np.zeros(1, np.float32)}), "exactly one"),
        (save({"lora_B": flat_with(np.nan)}), "not finite"),
        (save({"lora_B": flat_with(-np.inf)}), "not finite"),
        (save({"lora_B": np.zeros(8, np.float32)})[:-1], "not a complete safetensors"),
        (b"", "not a complete safetensors"),
        (b"x" * 10_000, "bytes"),
    ],
)
def test_bad_adapters_are_named(data, message):
    with pytest.raises(InvalidUpload, match=message):
        load_adapter(data, 8)


def test_invalid_fingerprint_metadata_reads_as_none():
    flat = np.zeros(2, np.float32)
    for text in ("", "[]", "7", '{"a_sha256"', "[" * 3900):
        assert named_fingerprint(dump_adapter(flat, {"mobizo": text})) is None
    assert named_fingerprint(dump_adapter(flat, {"mobizo": '{"a_sha256": "ab"}'})) == "ab"
