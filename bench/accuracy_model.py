"""A base model in PyTorch for `bench accuracy`: where it lies, in which type, its weights rounded or not."""

from __future__ import annotations

from typing import Any

import torch

from server.compiler.base import locate_base
from server.compiler.quantization import ROWS, SCHEMES, Scheme, dequantize, quantize
from shared.recipe import Precision


def load_model(base: str, device: str, dtype: str, precision: Precision = "fp32") -> Any:
    """transformers' AutoModelForCausalLM of a directory, .gguf file or id, on `device`, in evaluation mode.

    dtype: float32, float16 or bfloat16. precision: what the weights are rounded to by the compiler's own quantizers and
    turned back from; activations stay in `dtype` whatever it is.
    """
    from transformers import AutoModelForCausalLM

    files = locate_base(base)
    where = {"gguf_file": files.root.name} if files.form == "gguf" else {}
    root = files.root.parent if files.form == "gguf" else files.root
    model = AutoModelForCausalLM.from_pretrained(root, dtype=getattr(torch, dtype), **where).eval()
    if precision != "fp32":
        round_weights(model, precision)
    return model.to(device)


@torch.no_grad()
def round_weights(model: Any, precision: Precision) -> None:
    """Puts each frozen weight on its precision's grid: linear layers of the decoder, embedding table and lm_head."""
    done: set[int] = set()  # tied tables are one tensor
    for module in model.modules():
        table = isinstance(module, torch.nn.Embedding) or module is model.lm_head
        if not (table or isinstance(module, torch.nn.Linear)) or module.weight.data_ptr() in done:
            continue
        scheme: Scheme = ROWS if table else SCHEMES[precision]
        module.weight.copy_(dequantize(*quantize(module.weight.float(), scheme)))
        done.add(module.weight.data_ptr())
