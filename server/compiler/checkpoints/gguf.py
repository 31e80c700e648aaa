"""Reads a Llama checkpoint in GGUF format: one file of metadata and (quantized) tensors.

It maps tensor names, dequantizes blocks and restores the order of query and key rows. Tensors are read one at a time.
Tensors and settings that the decoder does not use are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType

from server.compiler.checkpoints.base import BaseFacts, BaseFiles, Rope
from server.compiler.checkpoints.gguf_file import GgufFile, GgufTensor
from server.compiler.checkpoints.lazy import LazyTensor
from shared.errors import UnreadableCheckpoint, UnsupportedModel

SUPPORTED = ("llama",)  # llama.cpp permutes and folds the tensors of other architectures differently
TOP_NAMES = {"token_embd": "embedding", "output_norm": "norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_norm",
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_norm": "post_norm",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's RoPE scaling, computed by llama.cpp's converter
LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(.+)\.weight")


def gguf_facts(files: BaseFiles) -> BaseFacts:
    """Returns the facts in the file's metadata. Raises UnreadableCheckpoint or UnsupportedModel."""
    return _facts(files, GgufFile.read(files.root))


def gguf_checkpoint(files: BaseFiles) -> tuple[BaseFacts, dict[str, LazyTensor]]:
    """Returns the facts and all tensors by canonical name."""
    file = GgufFile.read(files.root)
    return _facts(files, file), dict(_tensors(file))


def gguf_tensors(files: BaseFiles) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every weight with its canonical name."""
    for name, tensor in _tensors(GgufFile.read(files.root)):
        yield name, tensor.read()


def _facts(files: BaseFiles, file: GgufFile) -> BaseFacts:
    architecture = str(_field(file, "general.architecture"))
    if architecture not in SUPPORTED:
        raise UnsupportedModel(f"architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED)}")
    names = [_canonical(tensor.name) for tensor in _weights(file)]
    _refuse_features(file)
    heads = int(_field(file, "llama.attention.head_count"))
    hidden = int(_field(file, "llama.embedding_length"))
    head_dim = int(_field(file, "llama.attention.key_length", hidden // heads))
    if int(_field(file, "llama.rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel(
            "this llama checkpoint uses partial rotary embedding, which the decoder does not compute"
        )
    embedding = next((tensor for tensor in file.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise UnreadableCheckpoint("the GGUF file has no token_embd.weight")
    return BaseFacts(
        architecture=architecture,
        layers=int(_field(file, "llama.block_count")),
        hidden=hidden,
        intermediate=int(_field(file, "llama.feed_forward_length")),
        heads=heads,
        kv_heads=int(_field(file, "llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocabulary=embedding.shape[0],
        context_length=int(_field(file, "llama.context_length")),
        sha256=files.sha256,
        form="gguf",
        tied="lm_head" not in names,
        rope=_rope(file, head_dim),
        attention_scale=head_dim**-0.5,
        norm_eps=float(_field(file, "llama.attention.layer_norm_rms_epsilon")),
        parameters=sum(tensor.elements for tensor in _weights(file)),
    )


def _weights(file: GgufFile) -> list[GgufTensor]:
    return [tensor for tensor in file.tensors if tensor.name != ROPE_FACTORS]


def _rope(file: GgufFile, head_dim: int) -> Rope:
    """Returns the rotary embedding. As in llama.cpp, a factor without a type is linear, and a factor of 0 is none."""
    theta = float(_field(file, "llama.rope.freq_base", 10000.0))
    factor = float(_field(file, "llama.rope.scaling.factor", _field(file, "llama.rope.scale_linear", 0.0)))
    linear = factor not in (0.0, 1.0) and _scaling(file) == "linear"
    tensor = next((tensor for tensor in file.tensors if tensor.name == ROPE_FACTORS), None)
    if tensor is None:
        return Rope(theta=theta, kind="linear", factor=factor) if linear else Rope(theta=theta)
    if linear or tensor.type != GGMLQuantizationType.F32 or tensor.elements != head_dim // 2:
        raise UnsupportedModel(f"{ROPE_FACTORS} is not {head_dim // 2} float32 factors of an otherwise unscaled RoPE")
    return Rope(theta=theta, kind="factors", factors=tuple(float(value) for value in tensor.values().reshape(-1)))


def _scaling(file: GgufFile) -> str:
    return str(_field(file, "llama.rope.scaling.type", "linear"))


def _tensors(file: GgufFile) -> Iterator[tuple[str, LazyTensor]]:
    """Yields every weight with its canonical name."""
    heads = int(_field(file, "llama.attention.head_count"))
    kv_heads = int(_field(file, "llama.attention.head_count_kv", heads))
    for tensor in _weights(file):
        name = _canonical(tensor.name)
        try:
            tensor.values(rows=1)
        except (NotImplementedError, ValueError) as error:
            raise UnsupportedModel(
                f"tensor {tensor.name} has the unsupported type {tensor.type.name}; convert the file to another "
                "type, for example Q8_0"
            ) from error
        permuted = {"q_proj": heads, "k_proj": kv_heads}.get(name.rpartition(".")[2], 0)
        yield name, LazyTensor(tensor.shape, partial(_dequantized, tensor, permuted))


def _dequantized(tensor: GgufTensor, heads: int) -> torch.Tensor:
    """Returns a tensor in float32 and in Hugging Face's row order. heads: those whose rows llama.cpp permuted, or 0."""
    values = tensor.values()
    return torch.from_numpy(np.ascontiguousarray(_unpermute(values, heads) if heads else values))


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows (heads * head_dim, in) in Hugging Face's order: llama.cpp interleaves the rotary halves."""
    out_features, in_features = rows.shape
    pairs = rows.reshape(heads, out_features // heads // 2, 2, in_features)
    return pairs.swapaxes(1, 2).reshape(out_features, in_features)


def _field(file: GgufFile, name: str, default: Any = None) -> Any:
    if name in file.metadata:
        return file.metadata[name]
    if default is None:
        raise UnreadableCheckpoint(f"the GGUF file has no {name}")
    return default


def _canonical(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem != name and stem in TOP_NAMES:
        return TOP_NAMES[stem]
    match = LAYER_PATTERN.fullmatch(name)
    if match is None or match[2] not in LAYER_NAMES:
        raise UnsupportedModel(f"tensor {name} is not part of the supported llama decoder")
    return f"layers.{match[1]}.{LAYER_NAMES[match[2]]}"


def _refuse_features(file: GgufFile) -> None:
    scaling = _scaling(file)
    attention = float(_field(file, "llama.rope.scaling.attn_factor", 1.0))
    found = {
        f"RoPE scaling {scaling!r}": scaling not in ("none", "linear"),
        f"RoPE attention factor {attention}": attention != 1.0,
        "sliding-window attention": bool(_field(file, "llama.attention.sliding_window", 0)),
        "experts": bool(_field(file, "llama.expert_count", 0)),
    }
    if names := [name for name, present in found.items() if present]:
        raise UnsupportedModel(f"this llama checkpoint uses {', '.join(names)}, which the decoder does not compute")
