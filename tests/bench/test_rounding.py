"""A stock model on a precision's rounded weights and activations, against the formulas in NumPy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.baselines.rounding import round_activations, round_weights
from shared.recipe import Precision
from tests.server.compiler.conftest import make_tiny
from tests.server.compiler.model.test_quantization import RoundedLinear, rounded_model


@pytest.mark.parametrize("precision", ["int8", "int4", "int4-weight"])
def test_a_stock_model_computes_as_programs_of_the_precision_do(tmp_path: Path, precision: Precision) -> None:
    base = make_tiny(tmp_path, seed=4, intermediate_size=64, tie_word_embeddings=True)
    expected = rounded_model(base, precision)
    round_activations(base.model, precision)
    round_weights(base.model, precision)
    assert sum(isinstance(module, RoundedLinear) for module in expected.modules()) == 14
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected_logits = expected(tokens).logits
    logits = base.model(tokens).logits
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-4)
    (gradient,) = torch.autograd.grad(logits.square().sum(), base.model.model.norm.weight)
    assert gradient.abs().max() > 0


def test_gradients_pass_the_rounding_of_activations(tmp_path: Path) -> None:
    base = make_tiny(tmp_path, seed=4, intermediate_size=64)
    layer = base.model.model.layers[0].mlp.down_proj
    round_activations(base.model, "int4")
    round_weights(base.model, "int4")
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, layer.weight.sum(0).expand(2, 3, -1))
