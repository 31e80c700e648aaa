"""Reads a checkpoint in Hugging Face format: config.json and safetensors files.

It maps each architecture's tensor names and converts tensors to the layout of the decoder. It rejects unknown tensors.
torch is imported when a tensor is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from server.compiler.checkpoints.base import INDEX, UNHASHED, BaseFacts, BaseFiles, weight_files, weight_map
from server.compiler.checkpoints.hf_config import config_facts
from server.compiler.checkpoints.lazy import LazyTensor
from shared.errors import UnreadableCheckpoint, UnsupportedModel
from shared.recipe import TARGETS
from shared.zo.lora import hf_module_name

if TYPE_CHECKING:
    from torch import Tensor

LLAMA_NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}
HEAD_NORMS = {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}
NORMS: Mapping[str, Mapping[str, str]] = {
    "llama": LLAMA_NORMS,
    "qwen2": LLAMA_NORMS,
    "qwen3": {**LLAMA_NORMS, **HEAD_NORMS},
    "opt": {"self_attn_layer_norm": "input_norm", "final_layer_norm": "post_norm"},
    "gemma3_text": {
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "post_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
        **HEAD_NORMS,
    },
}
TOP_NAMES = {
    "embed_tokens": "embedding",
    "embed_positions": "positions",
    "norm": "norm",
    "final_layer_norm": "norm",
    "lm_head": "lm_head",
}
PREFIX = re.compile(r"(model\.)?(decoder\.)?")  # checkpoints without the LM head have no `model.` prefix
NAME = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")
DERIVED = re.compile(r".*rotary_emb\.inv_freq")  # stored by old checkpoints; derived from rope_theta

NORM_OFFSETS = {"gemma3_text": 1.0}  # norms of this architecture multiply by 1 + weight
UNUSED_POSITIONS = 2  # unused leading rows of OPT's position table
FLOATS = ("BF16", "F16", "F32", "F64")


def hf_checkpoint(files: BaseFiles) -> tuple[BaseFacts, dict[str, LazyTensor]]:
    """Returns the facts and all tensors by canonical name. Raises UnreadableCheckpoint, UnsupportedModel."""
    try:
        config = json.loads((files.root / "config.json").read_text(encoding="utf-8-sig"))
        config["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableCheckpoint("config.json is not a model configuration with a model_type") from error
    try:
        fields = config_facts(config)
        tensors = _tensors(files.root, fields["architecture"])
        if fields["tied"]:
            fields["tied"] = _tie(tensors)
        return BaseFacts(
            **fields,
            sha256=UNHASHED,
            form="huggingface",
            parameters=sum(math.prod(tensor.stored_shape) for tensor in tensors.values()),
        ), dict(tensors)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UnreadableCheckpoint(f"config.json lacks a usable value: {error}") from error


@dataclass(frozen=True)
class _StoredTensor(LazyTensor):
    """A tensor with its shape in the file."""

    stored_shape: tuple[int, ...]


def _tensors(directory: Path, architecture: str) -> dict[str, _StoredTensor]:
    """Returns the tensors of the weight files. Of several files that hold one tensor, the index names the right one."""
    file_of = weight_map(directory)
    tensors: dict[str, _StoredTensor] = {}
    for path in (path for path in weight_files(directory) if path.name != INDEX):
        with opened(path) as file:
            stored = set(file.keys())
            named = stored if file_of is None else {name for name, owner in file_of.items() if owner == path.name}
            if absent := sorted(named - stored):
                raise UnreadableCheckpoint(
                    f"{path.name} lacks {absent[0]}, which {INDEX} names; copy or download all weight files again"
                )
            for name in sorted(named):
                if DERIVED.fullmatch(name):
                    continue
                canonical, part = _canonical(architecture, name), file.get_slice(name)
                if canonical in tensors:
                    raise UnreadableCheckpoint(f"the checkpoint has two tensors {canonical}, one of them {name}")
                if (dtype := part.get_dtype()) not in FLOATS:
                    raise UnreadableCheckpoint(
                        f"{name} in {path.name} is stored as {dtype}; convert the weights to BF16, F16 or F32"
                    )
                rows, *columns = part.get_shape() or [1]
                unused = UNUSED_POSITIONS if canonical == "positions" else 0
                tensors[canonical] = _StoredTensor(
                    shape=(rows - unused, *columns),
                    read=partial(_read, path, name, architecture, canonical),
                    stored_shape=(rows, *columns),
                )
    return tensors


def _tie(tensors: dict[str, _StoredTensor]) -> bool:
    """Returns whether lm_head is the embedding table in a model whose configuration says so; drops a copy of it.

    As in transformers, a checkpoint that has two different tables is not tied, whatever its configuration says.
    """
    if "embedding" not in tensors and "lm_head" in tensors:
        tensors["embedding"] = tensors.pop("lm_head")
    if "lm_head" not in tensors:
        return True
    embedding, lm_head = tensors["embedding"], tensors["lm_head"]
    if embedding.shape != lm_head.shape or not bool((embedding.read() == lm_head.read()).all()):
        return False
    del tensors["lm_head"]
    return True


@contextmanager
def opened(path: Path, framework: str = "numpy") -> Iterator[Any]:
    """Opens a safetensors file. framework: of its tensors; "pt" for PyTorch.

    Raises UnreadableCheckpoint if it is truncated or damaged.
    """
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UnreadableCheckpoint(
            f"{path.name} is not a complete safetensors file ({error}); copy or download it again"
        ) from error


def _read(path: Path, name: str, architecture: str, canonical: str) -> Tensor:
    # The file is mapped while it is open: opening it for each tensor keeps only that tensor's pages in memory.
    import torch

    with opened(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name).to(torch.float32)
    return _as_taken(architecture, canonical, tensor)


def _canonical(architecture: str, name: str) -> str:
    inner = PREFIX.sub("", name, count=1)
    match = NAME.fullmatch(inner)
    if match is not None:
        layer, stem, kind = match.groups()
        canonical = TOP_NAMES.get(stem) if layer is None else _layer_names(architecture).get(stem)
        if canonical is not None:
            ending = "_bias" if kind == "bias" else ""
            return f"{canonical}{ending}" if layer is None else f"layers.{layer}.{canonical}{ending}"
    raise UnsupportedModel(f"tensor {name} is not part of the supported {architecture} decoder")


def _layer_names(architecture: str) -> dict[str, str]:
    return {**NORMS[architecture], **{hf_module_name(architecture, target): target for target in TARGETS}}


def _as_taken(architecture: str, name: str, tensor: Tensor) -> Tensor:
    """Returns a tensor in the layout of the decoder."""
    if name == "positions":
        return tensor[UNUSED_POSITIONS:]
    if name.endswith("norm") and architecture in NORM_OFFSETS:
        return tensor + NORM_OFFSETS[architecture]
    return tensor
