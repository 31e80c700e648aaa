"""A stock transformers model on a precision's rounded weights, in PyTorch.

The rounding is the compiler's own (`server.compiler.model.quantization`), so a precision can be judged without
compiling it; only the order in which a kernel adds differs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from server.compiler.checkpoints.base import locate_base
from server.compiler.model.quantization import ROWS, SCHEMES, Scheme, dequantize, quantize, target_scheme
from shared.recipe import Precision
from shared.zo.lora import BaseShape, hf_module_name


def load_model(base: str, device: str, dtype: str, precision: Precision = "fp32") -> Any:
    """Loads transformers' AutoModelForCausalLM from a directory, .gguf file or id, in evaluation mode.

    dtype: float32, float16 or bfloat16, of weights and activations. precision: what the weights are rounded to.
    """
    files = locate_base(base)
    root, options = files.root, {}
    if files.form == "gguf":
        root, options = files.root.parent, {"gguf_file": files.root.name}
    model = AutoModelForCausalLM.from_pretrained(root, dtype=getattr(torch, dtype), **options).eval()
    if precision != "fp32":
        round_weights(model, precision)
    return model.to(device)


def round_weights(model: Any, precision: Precision) -> list[tuple[Tensor, Tensor]]:
    """Rounds the frozen weights: linear layers of the decoder, embedding table and lm_head. Norms stay.

    Returns each weight with its data from before.
    """
    before = {}
    for module in model.modules():
        table = isinstance(module, torch.nn.Embedding) or module is model.get_output_embeddings()
        if (table or isinstance(module, torch.nn.Linear)) and id(module.weight) not in before:  # tied tables are one
            weight, data = module.weight, module.weight.data
            scheme: Scheme = ROWS if table else SCHEMES[precision]
            weight.data = dequantize(*quantize(data.float(), scheme)).to(data.dtype)
            before[id(weight)] = weight, data
    return list(before.values())


@contextmanager
def rounded(model: Any, shape: BaseShape, precision: Precision) -> Iterator[None]:
    """Within the context, `model` computes as a base of `precision` does, activations rounded too."""
    if precision == "fp32":
        yield
        return
    linears = [
        layer.get_submodule(hf_module_name(shape.architecture, target))
        for layer in model.get_decoder().layers
        for target in shape.linears
        if (scheme := target_scheme(precision, target)) is not None and scheme.dynamic
    ]
    before = round_weights(model, precision)
    for linear in linears:
        linear.forward = _with_rounded_activations(linear)
    try:
        yield
    finally:
        for weight, data in before:
            weight.data = data
        for linear in linears:
            del linear.forward


def _with_rounded_activations(linear: Any) -> Any:
    """Returns a forward pass that rounds each token's activations to 8 bits, as `quantization.linear` does."""
    operations = torch.ops.quantized_decomposed

    def forward(x: Tensor) -> Tensor:
        scale, zero = operations.choose_qparams_per_token_asymmetric(x, torch.int8)
        token = (scale, zero, -128, 127, torch.int8)
        x = operations.dequantize_per_token(operations.quantize_per_token(x, *token), *token, torch.float32)
        return functional.linear(x, linear.weight, linear.bias)

    return forward
