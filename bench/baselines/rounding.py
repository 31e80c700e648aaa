"""A stock transformers model on a precision's rounded weights, in PyTorch.

The rounding is the compiler's own (`server.compiler.model.rounding`), so a precision can be judged without compiling
it; only the order in which a kernel adds differs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from server.compiler.checkpoints.base import locate_base
from server.compiler.model.quantization import quantized_tokens
from server.compiler.model.rounding import ROWS, dequantize, quantized, target_scheme
from shared.recipe import TARGETS, Precision


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
        round_weights(model, precision)
        if activations:
            round_activations(model, precision)
    return model.to(device)


def round_weights(model: Any, precision: Precision) -> None:
    """Rounds the frozen weights: linear layers of the decoder, embedding table and lm_head. Norms stay."""
    done: set[int] = set()
    for name, module in model.named_modules():
        table = isinstance(module, torch.nn.Embedding) or module is model.get_output_embeddings()
        if (table or isinstance(module, torch.nn.Linear)) and id(module.weight) not in done:  # tied tables are one
            data, scheme = module.weight.data, ROWS if table else target_scheme(precision, _target(name))
            assert scheme is not None  # noqa: S101  # fp32 has no rounded weights
            module.weight.data = dequantize(*quantized("weight", data.float(), scheme).values()).to(data.dtype)
            done.add(id(module.weight))


def round_activations(model: Any, precision: Precision) -> None:
    """Rounds the inputs of the decoder's linear layers, as the precision's programs do.

    Gradients pass the rounding unchanged: they are those of the function that the rounded one follows.
    """
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            scheme = target_scheme(precision, _target(name))
            if scheme is not None and scheme.dynamic:
                module.forward = _RoundedInputs(module)


class _RoundedInputs:
    """The forward of a linear layer whose inputs are rounded. Hooks on the layer still get the inputs unrounded."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        self._weight, self._bias = layer.weight, layer.bias

    def __call__(self, x: Tensor) -> Tensor:
        rounded = x + (quantized_tokens(x.detach()) - x.detach())
        return functional.linear(rounded, self._weight, self._bias)


def _target(name: str) -> Any:
    """Returns the target that a module of the model is, by its name; other models' layers have none of its exceptions."""
    last = name.rpartition(".")[2]
    return last if last in TARGETS else TARGETS[0]
