"""A stock transformers model on a precision's rounded weights, in PyTorch.

The rounding is the compiler's own (`server.compiler.model.quantization`), so a precision can be judged without
compiling it; only the order in which a kernel adds differs.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from server.compiler.checkpoints.base import locate_base
from server.compiler.model.quantization import ROWS, SCHEMES, dequantize, quantize
from shared.recipe import Precision


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


def round_weights(model: Any, precision: Precision) -> None:
    """Rounds the frozen weights: linear layers of the decoder, embedding table and lm_head. Norms stay."""
    done: set[int] = set()
    for module in model.modules():
        table = isinstance(module, torch.nn.Embedding) or module is model.get_output_embeddings()
        if (table or isinstance(module, torch.nn.Linear)) and id(module.weight) not in done:  # tied tables are one
            data, scheme = module.weight.data, ROWS if table else SCHEMES[precision]
            module.weight.data = dequantize(*quantize(data.float(), scheme)).to(data.dtype)
            done.add(id(module.weight))
