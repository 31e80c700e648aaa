"""Precisions: rounding against its formulas, compiled steps against the stock model on the same rounded weights, files.

The stock model's linear layers are replaced by ones that hold what the formulas give, and round activations by the
formulas of per-token asymmetric int8, all written here in NumPy.
"""

import copy

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf import dequantize as gguf_dequantize
from gguf import quantize as gguf_quantize
from torch import nn

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.export.network import QuantizedBase
from server.compiler.export.weights import write_weights
from server.compiler.model.quantization import stored_bytes
from server.compiler.model.rounding import SCHEMES, dequantize, quantized
from shared.canonical import file_sha256
from shared.zo.noise import query_seeds
from tests.server.compiler import reference
from tests.server.compiler.checks import check_split
from tests.server.compiler.conftest import VOCABULARY, make_tiny

LR, EPS, STEPS = 0.05, 0.05, 3
PRECISIONS = ("int8", "int4", "int8-weight", "int4-weight")
DYNAMIC = ("int8", "int4")
# Relative. Of dynamic ones: room for an activation that a last bit of a float32 sum rounds to the other side.
LOSS_TOLERANCE = {"int8": 1e-4, "int4": 1e-4, "int8-weight": 1e-5, "int4-weight": 1e-5}


def bfloat16(values):
    """To nearest, ties to even, of positive float32."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def rounded_weight(weight, precision):
    """What the precision's integers stand for, and the groups' offsets that are added to it; float32 (out, in)."""
    rows = [rounded_row(row, precision) for row in weight.astype(np.float32)]
    return np.stack([row for row, _ in rows]), np.stack([offset for _, offset in rows])


def rounded_row(row, precision):
    """8 bits: the largest magnitude is 127 steps. 4 bits: the step with the least squared error."""
    if precision == "int4":
        return rounded_groups(row)
    step = np.abs(row).max() / np.float32(127)
    tries = []
    for fraction in [1 - twentieth / 20 for twentieth in range(9)] if precision == "int4-weight" else []:
        integers = np.clip(np.rint(row / (np.abs(row).max() / np.float32(7) * np.float32(fraction))), -8, 7)
        best = (integers @ row) / (integers @ integers)  # least squares
        tries.append((np.square(integers * best - row).sum(), best))
    end, step = (127, step) if not tries else (8, min(tries)[1])
    return (np.clip(np.rint(row / step), -end, 127 if end == 127 else 7) * step).astype(np.float32), np.zeros_like(row)


def rounded_groups(row):
    """Groups of 32: integers of -8 to 7 times a bfloat16 step, plus an offset of 8 bits, one scale a row."""
    steps, offsets = [], []
    for group in row.reshape(-1, 32):
        middle, tries = (group.max() + group.min()) / 2, []
        for span in [15, 14, 13, 12, 11, 10, 9, 8, 16, 17, 18, 20, 22, 24]:
            step = bfloat16((group.max() - group.min()) / np.array([span], np.float32))[0]
            rest = group - step * np.clip(np.rint((group - middle) / step - (0.5 if span % 2 else 0)), -8, 7)
            tries.append((np.square(rest - rest.mean()).sum(), step, rest.mean()))
        _, step, offset = min(tries, key=lambda each: each[0])
        steps.append(step)
        offsets.append(offset)
    scale = np.abs(offsets).max() / np.float32(127)
    step, offset = np.array(steps)[:, None], (np.rint(offsets / scale) * scale)[:, None].astype(np.float32)
    integers = np.clip(np.rint((row.reshape(-1, 32) - offset) / step), -8, 7)
    return (integers * step).reshape(-1), np.broadcast_to(offset, integers.shape).reshape(-1)


def rounded_tokens(x):
    """x (..., in) rounded to 256 steps between each token's least and largest feature, zero among the steps."""
    least, most = np.minimum(x.min(-1, keepdims=True), 0), np.maximum(x.max(-1, keepdims=True), 0)
    scale = (most - least) / np.float32(255)
    zero = np.rint(-128 - least / scale)
    return ((np.clip(np.rint(x / scale) + zero, -128, 127) - zero) * scale).astype(np.float32)


class RoundedLinear(nn.Module):
    """A linear layer on rounded weights, and on rounded activations if it is dynamic; offsets meet unrounded ones."""

    def __init__(self, layer, name, precision):
        super().__init__()
        weight, offset = rounded_weight(layer.weight.detach().numpy(), precision)
        self.weight, self.offset = torch.from_numpy(weight), torch.from_numpy(offset)
        self.dynamic = precision in DYNAMIC and not (precision == "int8" and name.endswith("down_proj"))

    def forward(self, x):
        rounded_x = torch.from_numpy(rounded_tokens(x.numpy())) if self.dynamic else x
        return rounded_x @ self.weight.T + x @ self.offset.T


def rounded_model(base, precision):
    """The stock model as the precision has it: tables of 8-bit rows, decoder layers of rounded linear layers."""
    model = copy.deepcopy(base.model)
    for name, module in base.model.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            model.model.layers.set_submodule(name, RoundedLinear(module, name, precision))
    table, _ = rounded_weight(model.model.embed_tokens.weight.detach().numpy(), "int8-weight")
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.from_numpy(table))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """Tied; every linear layer's input is a multiple of 32."""
    return make_tiny(tmp_path_factory.mktemp("wide"), seed=4, intermediate_size=64, tie_word_embeddings=True)


@pytest.fixture
def program_for(wide, programs):
    """Programs by precision; the two that round activations leave the first layer frozen."""

    def program(precision):
        loss = "candidates" if precision == "int8-weight" else "full"
        layers = "last:1" if precision in DYNAMIC else "all"
        targets = ("q_proj", "down_proj") if precision == "int4" else ("q_proj", "v_proj")
        return programs(wide, queries=2, precision=precision, loss=loss, layers=layers, targets=targets)

    return program


@pytest.mark.slow  # programs
@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_are_the_stock_models_on_rounded_weights(program_for, wide, precision):
    program, model, rng = program_for(precision), rounded_model(wide, precision), np.random.default_rng(7)
    manifest, tolerance = program.manifest, LOSS_TOLERANCE[precision]
    flat = program.load_some_b()
    for number in range(STEPS):
        batch = reference.random_batch(rng, manifest.recipe, VOCABULARY)
        seeds = query_seeds(123, number, 2)
        losses, coefficients = program.step(batch, seeds, LR, EPS)
        expected, steps, after = reference.step(model, manifest.recipe, manifest.shape, flat, batch, seeds, LR, EPS)
        np.testing.assert_allclose(losses, expected, rtol=tolerance)
        plain, *_ = reference.step(wide.model, manifest.recipe, manifest.shape, flat, batch, seeds, LR, EPS)
        assert np.abs(plain / expected - 1).max() > 10 * tolerance  # unrounded, it would not pass
        error = tolerance * np.abs(expected).max() * LR / 2 / EPS  # of a coefficient, of which B adds two
        np.testing.assert_allclose(coefficients, steps, rtol=0, atol=error)
        (flat,) = program("adapter")
        np.testing.assert_allclose(flat, after, rtol=0, atol=2 * error)


@pytest.mark.slow
@pytest.mark.parametrize("precision", DYNAMIC)
def test_a_cached_prefix_gives_the_same_bits_with_rounded_activations(program_for, precision):
    program, rng = program_for(precision), np.random.default_rng(3)
    batches = [reference.random_batch(rng, program.manifest.recipe, VOCABULARY) for _ in range(2)]
    check_split(program, batches, [(query_seeds(1, number, 2), LR, EPS) for number in range(2)])


@pytest.mark.slow
def test_weights_are_one_file_for_equal_bits_whatever_the_recipe(program_for, wide, tmp_path):
    files = {name: program_for(name).manifest.file("weights").sha256 for name in ("int4", "int8-weight", "int4-weight")}
    # Of int8, whose weights are rounded as int8-weight's are, the file that the base makes without a recipe.
    write_weights(QuantizedBase.of(load_checkpoint(str(wide.directory)), "int8").stored, tmp_path / "weights.ptd")
    assert files["int8-weight"] == file_sha256(tmp_path / "weights.ptd")
    assert len(set(files.values())) == 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["fp32", *PRECISIONS])
def test_every_tensor_is_stored_once_in_the_bits_of_its_precision(tmp_path, precision, tied):
    base = make_tiny(
        tmp_path / "base",
        hidden_size=256,
        intermediate_size=512,
        vocab_size=4096,
        num_hidden_layers=1,
        tie_word_embeddings=tied,
    )
    write_weights(QuantizedBase.of(load_checkpoint(str(base.directory)), precision).stored, tmp_path / "weights.ptd")
    linear = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 512  # attention's four, the MLP's three
    rows = 256 + 128 + 128 + 256 + 2 * 512 + 256
    tables = 4096 * (1 if tied else 2)
    norms = 3 * 256 * 4
    expected = {
        "fp32": norms + 4 * (linear + tables * 256),
        "int8": norms + linear + 4 * rows + tables * (256 + 4),
        "int4": norms + linear // 2 + 3 * linear // 32 + 4 * rows + tables * (256 + 4),
        "int8-weight": norms + linear + 4 * rows + tables * (256 + 4),
        "int4-weight": norms + linear // 2 + 4 * rows + tables * (256 + 4),
    }[precision]
    size = (tmp_path / "weights.ptd").stat().st_size
    assert expected <= size < expected + 8192  # keys, names and alignment


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_rounded_by_the_formula(precision):
    weight = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    weight[3] = 0
    buffers = quantized("w", torch.from_numpy(weight), SCHEMES[precision])
    values = dequantize(*buffers.values()).numpy()
    rows = [0, 1, 2, 4]
    np.testing.assert_allclose(values[rows], sum(rounded_weight(weight[rows], precision)), rtol=0, atol=1e-6)
    assert not values[3].any()
    assert all(bool((scales > 0).all()) for name, scales in buffers.items() if name.endswith("_scale"))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1])
def test_a_weight_of_a_four_bit_gguf_file_loses_little(kind):
    weight = np.random.default_rng(2).standard_normal((64, 576)).astype(np.float32)
    stored = gguf_dequantize(gguf_quantize(weight, kind), kind)
    values = dequantize(*quantized("w", torch.from_numpy(stored), SCHEMES["int4"]).values()).numpy()
    assert np.square(values - stored).mean() < 1e-4 * np.square(stored).mean()
    assert np.square(stored - weight).mean() > 5e-3 * np.square(weight).mean()


def test_four_bit_values_are_stored_two_a_byte_the_first_one_low():
    values = torch.tensor([[-8, 7, 0, 1], [3, -1, -7, 2]], dtype=torch.int8)
    assert stored_bytes("q_proj", values, SCHEMES["int4"]) == bytes([0xF0, 0x98, 0x7B, 0xA1])
    assert stored_bytes("q_proj", values, SCHEMES["int8"]) == values.numpy().tobytes()
    scales = torch.tensor([[0.5, 1.5]])
    assert stored_bytes("q_proj_scale", scales, SCHEMES["int4"]) == bytes([0x00, 0x3F, 0xC0, 0x3F])
    assert stored_bytes("q_proj_scale", scales, SCHEMES["int4-weight"]) == scales.numpy().tobytes()
    assert stored_bytes("q_proj_offset", values, SCHEMES["int4"]) == values.numpy().tobytes()
    assert stored_bytes("q_proj_offset_scale", scales[0], SCHEMES["int4"]) == scales.numpy().tobytes()
