"""Attention over the filled part of a key-value cache: the operator `llama::custom_sdpa` of ExecuTorch's LLM extension.

ExecuTorch's wheel has it in a library for Python. The native runner has a kernel of its own
(device_agent/runner/attention.cpp).
"""

from __future__ import annotations

from pathlib import Path

import torch
from executorch.extension.pybindings import portable_lib  # has the registry that the library links
from torch import Tensor

from shared.errors import ToolchainMissing

FUNCTION = "llama::custom_sdpa"


def attention_call(q: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
    """Returns causal attention's output, as q, for scaled queries q (1, L, heads, head_dim) from position `first` on.

    keys, values: (1, C, kv_heads, head_dim), filled up to position first + L.
    """
    mixed: Tensor = torch.ops.llama.custom_sdpa(q, keys, values, first, None, 0.0, True, 1.0)
    return mixed


def _shaped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start_pos: int,
    attn_mask: Tensor | None = None,
    drpout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    return torch.empty_like(query)


def _load() -> None:
    libraries = sorted(Path(portable_lib.__file__).parents[1].glob("llm/custom_ops/*custom_ops_aot_lib.*"))
    if not libraries:
        raise ToolchainMissing("this ExecuTorch lacks the operators of its LLM extension; install the wheel from PyPI")
    torch.ops.load_library(libraries[0])
    torch.library.register_fake(FUNCTION, _shaped)


_load()
