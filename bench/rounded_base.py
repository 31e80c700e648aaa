"""A stock transformers model that computes with a precision's rounded weights and activations, in PyTorch.

The compiler's own rounding (`server.compiler.quantization`), so that a precision can be judged without compiling it;
what is left out is the order in which a kernel adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from server.compiler.quantization import ROWS, Scheme, dequantize, quantize, target_scheme
from shared.lora import BaseShape, hf_module_name
from shared.recipe import Precision


@contextmanager
def rounded(model: Any, shape: BaseShape, precision: Precision) -> Iterator[None]:
    """While it lasts, `model` (transformers' AutoModelForCausalLM) computes as a base of `precision` does."""
    kept: list[tuple[Tensor, Tensor]] = []
    forwards: list[Any] = []
    try:
        if precision != "fp32":
            for layer in model.get_decoder().layers:
                for target in shape.linears:
                    linear = layer.get_submodule(hf_module_name(shape.architecture, target))
                    scheme = target_scheme(precision, target)
                    assert scheme is not None
                    kept.append((linear.weight, _round(linear.weight, scheme)))
                    if scheme.dynamic:
                        linear.forward = _dynamic(linear)
                        forwards.append(linear)
            kept += [(weight, _round(weight, ROWS)) for weight in _tables(model)]
        yield
    finally:
        for weight, original in kept:
            weight.data = original
        for linear in forwards:
            del linear.forward


def _tables(model: Any) -> list[Tensor]:
    """Embedding table and head, one tensor if they are tied."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return [table] if table is head else [table, head]


def _round(weight: Tensor, scheme: Scheme) -> Tensor:
    """Rounds a parameter (out, in) in place of itself; returns what it was."""
    original = weight.data
    weight.data = dequantize(*quantize(original.float(), scheme)).to(original.dtype)
    return original


def _dynamic(linear: Any) -> Any:
    """A forward pass that rounds each token's activations to 8 bits, as `quantization.linear` does."""
    operations = torch.ops.quantized_decomposed

    def forward(x: Tensor) -> Tensor:
        scale, zero = operations.choose_qparams_per_token_asymmetric(x, torch.int8)
        token = (scale, zero, -128, 127, torch.int8)
        x = operations.dequantize_per_token(operations.quantize_per_token(x, *token), *token, torch.float32)
        return functional.linear(x, linear.weight, linear.bias)

    return forward
