"""Reads a checkpoint in Hugging Face format: config.json and safetensors files.

It maps each architecture's tensor names and converts tensors to the layout of the decoder. It rejects unknown tensors.
torch is imported when a tensor is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from server.compiler.checkpoints.architectures import MULTIMODAL, UNQUANTIZED, architecture_of
from server.compiler.checkpoints.base import INDEX, UNHASHED, BaseFacts, BaseFiles, weight_files, weight_map
from server.compiler.checkpoints.hf_config import config_facts
from server.compiler.checkpoints.lazy import LazyTensor
from shared.errors import UnreadableCheckpoint, UnsupportedModel
from shared.invalid_fields import first_invalid
from shared.recipe import TARGETS
from shared.zo.lora import file_rows, head_order, module_names

if TYPE_CHECKING:
    from torch import Tensor

TOP_NAMES = {
    "embed_tokens": "embedding",
    "embed_in": "embedding",
    "wte": "embedding",
    "embed_positions": "positions",
    "wpe": "positions",
    "norm": "norm",
    "final_layer_norm": "norm",
    "final_layernorm": "norm",
    "ln_f": "norm",
    "embedding_norm": "norm",
    "lm_head": "lm_head",
    "embed_out": "lm_head",
}
# Checkpoints without the LM head have no `model.` prefix.
PREFIX = re.compile(r"(language_model\.)?(model\.|gpt_neox\.|transformer\.)?(language_model\.|decoder\.)?")
NAME = re.compile(r"(?:(?:layers|h)\.(\d+)\.)?(.+)\.(weight|bias)")
# Stored by old checkpoints: what follows from rope_theta, and causal masks.
DERIVED = re.compile(r".*rotary_emb\.inv_freq|.*\.(attn|attention)\.(masked_)?bias")
OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\..*")  # of multimodal models
# Of weights that GPTQ, AWQ, bitsandbytes, compressed-tensors or MLX quantized.
QUANTIZED = re.compile(
    r".*\.(qweight|qzeros|scales|biases|g_idx|SCB|weight_packed|weight_scale|weight\.(absmax|quant_state\..*))"
)
CONVOLUTION_KERNEL = "conv.conv"  # within a layer
FLOATS = ("BF16", "F16", "F32", "F64")


def hf_checkpoint(files: BaseFiles, compare_tables: bool = True) -> tuple[BaseFacts, dict[str, LazyTensor]]:
    """Returns the facts and all tensors by canonical name. Raises UnreadableCheckpoint, UnsupportedModel.

    compare_tables: see `open_checkpoint`.
    """
    facts = config_only(files.root)
    tensors = _tensors(files.root, facts)
    found = {
        "tied": facts.tied and _tie(tensors, compare_tables),
        "parameters": sum(math.prod(tensor.stored_shape) for tensor in tensors.values()),
    }
    return facts.model_copy(update=found), {**absent_biases(facts), **tensors}


def config_only(directory: Path) -> BaseFacts:
    """Returns the facts in config.json, without a number of parameters. Raises as `hf_checkpoint`."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8-sig"))
        config["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableCheckpoint("config.json is not a model configuration with a model_type") from error
    try:
        return BaseFacts(**config_facts(config), sha256=UNHASHED, form="huggingface", parameters=0)
    except ValidationError as error:
        raise UnreadableCheckpoint(f"config.json lacks a usable value: {first_invalid(error)}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UnreadableCheckpoint(f"config.json lacks a usable value: {error}") from error


@dataclass(frozen=True)
class _StoredTensor(LazyTensor):
    """A tensor with its shape in the file."""

    stored_shape: tuple[int, ...]


def absent_biases(facts: BaseFacts) -> dict[str, LazyTensor]:
    """Returns biases of zeros for an architecture whose layer norms have none."""
    if facts.norm == "rms" or architecture_of(facts.architecture).norm_biases:
        return {}
    zeros = LazyTensor((facts.hidden,), partial(_zeros, facts.hidden))
    layers = [f"layers.{index}.{name}" for index in range(facts.layers) for name in facts.layer_norms]
    return {name: zeros for name in (*layers, *facts.final_norms) if name.endswith("_bias")}


def _zeros(size: int) -> Tensor:
    import torch

    return torch.zeros(size)


def _tensors(directory: Path, facts: BaseFacts) -> dict[str, _StoredTensor]:
    """Returns the tensors of the weight files. Of several files that hold one tensor, the index names the right one."""
    stems, multimodal = _layer_names(facts), facts.architecture in MULTIMODAL
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
                if DERIVED.fullmatch(name) or (multimodal and OTHER_PARTS.fullmatch(name)):
                    continue
                canonical_names, part = _canonical(facts, stems, name), file.get_slice(name)
                if (dtype := part.get_dtype()) not in FLOATS:
                    raise UnreadableCheckpoint(
                        f"{name} in {path.name} is stored as {dtype}; convert the weights to BF16, F16 or F32, "
                        "or use the model from before its quantization"
                    )
                for canonical in canonical_names:
                    if canonical in tensors:
                        raise UnreadableCheckpoint(f"the checkpoint has two tensors {canonical}, one of them {name}")
                    tensors[canonical] = _stored(path, name, tuple(part.get_shape() or [1]), facts, canonical)
    return tensors


def _stored(path: Path, name: str, shape: tuple[int, ...], facts: BaseFacts, canonical: str) -> _StoredTensor:
    """Returns the tensor `canonical`, which is stored under `name` by itself or with others."""
    architecture, (place, _, stem) = architecture_of(facts.architecture), canonical.rpartition(".")
    target, rows, stored_shape = stem.removesuffix("_bias"), None, shape
    if place:
        facts = facts.of_layer(int(place.removeprefix("layers.")))
    if target in TARGETS:
        if architecture.transposed:
            shape = stored_shape = shape[::-1]
        module, rows = file_rows(facts, target)
        fused = module_names(facts).fused.get(module)
        if fused is not None and shape[0] == sum(facts.features(each)[1] for each in fused):
            shape = stored_shape = (facts.features(target)[1], *shape[1:])
    elif stem in facts.head_norms:
        rows = head_norm_rows(facts, stem)
    elif stem in facts.mixer_vectors:  # of a convolution's kernel, (hidden, 1, taps)
        shape = stored_shape = shape[:1] if shape[1:] == (1, facts.conv_taps) else shape
    elif stem == "positions":
        shape = (shape[0] - architecture.unused_positions, *shape[1:])
    return _StoredTensor(shape, partial(_read, path, name, facts, canonical, rows), stored_shape)


def head_norm_rows(facts: BaseFacts, name: str) -> NDArray[np.int64]:
    """Returns, for each element of a norm of queries or keys here, its place in the base's own files."""
    order = head_order(facts.head_dim, facts.rotary_dim, facts.interleaved)
    return np.arange(facts.head_norm_size(name)).reshape(-1, facts.head_dim)[:, order].reshape(-1)


def _tie(tensors: dict[str, _StoredTensor], compare: bool) -> bool:
    """Returns whether lm_head is the embedding table in a model whose configuration says so; drops a copy of it.

    As in transformers, a checkpoint that has two different tables is not tied, whatever its configuration says.
    compare: their values, and not their shapes alone.
    """
    if "embedding" not in tensors and "lm_head" in tensors:
        tensors["embedding"] = tensors.pop("lm_head")
    if "lm_head" not in tensors:
        return True
    embedding, lm_head = tensors["embedding"], tensors["lm_head"]
    if embedding.shape != lm_head.shape or (compare and not bool((embedding.read() == lm_head.read()).all())):
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


def _read(path: Path, name: str, facts: BaseFacts, canonical: str, rows: NDArray[np.int64] | None) -> Tensor:
    """Returns a tensor in the layout of the decoder. rows: the stored ones; None: all."""
    # The file is mapped while it is open: opening it for each tensor keeps only that tensor's pages in memory.
    import torch

    with opened(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name).to(torch.float32)
    architecture, stem = architecture_of(facts.architecture), canonical.rpartition(".")[2]
    if architecture.transposed and tensor.dim() == 2 and stem in TARGETS:
        tensor = tensor.T.contiguous()
    if stem == "positions":
        return tensor[architecture.unused_positions :]
    if stem.startswith("tap_"):
        return tensor[:, 0, int(stem.removeprefix("tap_"))].contiguous()
    if rows is not None:
        tensor = tensor[torch.from_numpy(rows)]
    if stem.endswith("norm") and architecture.norm_offset:
        tensor = tensor + architecture.norm_offset
    return tensor * facts.logits_scale if canonical in facts.final_norms and facts.logits_scale != 1.0 else tensor


def _canonical(facts: BaseFacts, stems: Mapping[str, Sequence[str]], name: str) -> list[str]:
    """Returns the canonical names of what the tensor `name` holds. stems: as `_layer_names` returns them."""
    inner = PREFIX.sub("", name, count=1)
    match = NAME.fullmatch(inner)
    if match is not None:
        layer, stem, kind = match.groups()
        ending = "_bias" if kind == "bias" else ""
        if layer is None and stem in TOP_NAMES:
            return [TOP_NAMES[stem] + ending]
        if layer is not None and stem in stems:
            return [f"layers.{layer}.{canonical}{ending}" for canonical in stems[stem]]
    if QUANTIZED.fullmatch(name):
        raise UnsupportedModel(f"the weights are quantized (tensor {name}); {UNQUANTIZED}")
    raise UnsupportedModel(
        f"tensor {name} is not part of the supported {facts.architecture} decoder; use a model without it"
    )


def _layer_names(facts: BaseFacts) -> dict[str, Sequence[str]]:
    """Returns the canonical names of the tensors that each name within a layer stands for."""
    norms = architecture_of(facts.architecture).norms
    names: dict[str, Sequence[str]] = {stem: [canonical] for stem, canonical in norms.items()}
    for kind in dict.fromkeys(facts.of_layers()):
        own: dict[str, Sequence[str]] = {CONVOLUTION_KERNEL: list(kind.mixer_vectors)} if kind.convolves else {}
        for target in kind.linears:
            module = file_rows(kind, target)[0]
            own[module] = [*own.get(module, ()), target]
        names |= own
    return names
