"""A stock transformers model on a precision's rounded weights, in PyTorch.

The rounding is the compiler's own (`server.compiler.model.rounding`), so a precision can be judged without compiling
it; only the order in which a kernel adds differs.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from server.compiler.checkpoints.base import locate_base
from server.compiler.model.quantization import quantized_tokens
from server.compiler.model.rounding import (
    ROWS,
    SCHEMES,
    Scheme,
    dequantize,
    quantize_groups,
    quantized,
    target_scheme,
)
from shared.recipe import Precision, Target


def load_model(base: str, device: str, dtype: str, precision: Precision = "fp32", *, activations: bool = False) -> Any:
    """Loads transformers' AutoModelForCausalLM from a directory, .gguf file or id, in evaluation mode.

    dtype: float32, float16 or bfloat16, of weights and activations. precision: what the weights are rounded to.
    activations: round those too that the precision's programs round.
    """
    files = locate_base(base)
    root, options = files.root, {}
    if files.form == "gguf":
        root, options = files.root.parent, {"gguf_file": files.root.name}
    model = AutoModelForCausalLM.from_pretrained(root, dtype=getattr(torch, dtype), **options).eval()
    if precision != "fp32":
        if activations:
            round_activations(model, precision)
        round_weights(model, precision)
    return model.to(device)


def round_weights(model: Any, precision: Precision) -> None:
    """Rounds the frozen weights: linear layers of the decoder, embedding table and lm_head. Norms stay."""
    rounded_ids: set[int] = set()
    for name, module in model.named_modules():
        table = isinstance(module, torch.nn.Embedding) or module is model.get_output_embeddings()
        if (table or isinstance(module, torch.nn.Linear)) and id(
            module.weight
        ) not in rounded_ids:  # tied tables are one
            data, scheme = module.weight.data, ROWS if table else _scheme(precision, name)
            module.weight.data = dequantize(*quantized("weight", data.float(), scheme).values()).to(data.dtype)
            rounded_ids.add(id(module.weight))


def round_activations(model: Any, precision: Precision) -> None:
    """Rounds the inputs of the decoder's linear layers, as programs of the precision do; before `round_weights`.

    Gradients pass the rounding unchanged: they are those of the function that the rounded one follows in steps.
    """
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear) and (scheme := _scheme(precision, name)).dynamic:
            module.forward = _RoundedInputs(module, scheme)


class _RoundedInputs:
    """The forward of a linear layer whose inputs are rounded. Hooks on the layer still get the inputs unrounded.

    The offsets of groups meet unrounded inputs.
    """

    def __init__(self, layer: torch.nn.Linear, scheme: Scheme) -> None:
        self._layer, self._group = layer, scheme.group
        if scheme.group:
            *_, offsets, scales = quantize_groups(layer.weight.data.float(), scheme)
            self._offsets = dequantize(offsets, scales)

    def __call__(self, x: Tensor) -> Tensor:
        rounding_error = (x - quantized_tokens(x)).detach()
        y = functional.linear(x - rounding_error, self._layer.weight, self._layer.bias)
        if self._group:
            y = y + functional.linear(rounding_error.unflatten(-1, (-1, self._group)).sum(-1), self._offsets)
        return y


def _scheme(precision: Precision, name: str) -> Scheme:
    """Returns the scheme of the decoder's linear layer with this name; layers that are no target have the usual one."""
    last = name.rpartition(".")[2]
    return target_scheme(precision, cast(Target, last)) or SCHEMES[precision]
