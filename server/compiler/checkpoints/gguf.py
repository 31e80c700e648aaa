"""Reads a checkpoint in GGUF format, one file of metadata and (quantized) tensors. Architectures: `gguf_names`.

It maps tensor names, dequantizes blocks and restores the order of query and key rows. Tensors are read one at a time.
Tensors and settings that the decoder does not use are rejected. torch is imported when a tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from gguf import GGMLQuantizationType

from server.compiler.checkpoints.base import UNHASHED, AttentionKind, BaseFacts, BaseFiles, NormPlace, Rope
from server.compiler.checkpoints.gguf_file import GgufFile, GgufTensor
from server.compiler.checkpoints.gguf_names import (
    ARCHITECTURES,
    GEMMA_27B_LAYERS,
    GEMMA_PATTERN,
    GEMMA_SLIDING_THETA,
    TOP_NAMES,
    GgufArchitecture,
)
from server.compiler.checkpoints.lazy import LazyTensor
from shared.errors import UnreadableCheckpoint, UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's RoPE scaling, computed by llama.cpp's converter
LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(.+)")


def gguf_checkpoint(files: BaseFiles) -> tuple[BaseFacts, dict[str, LazyTensor]]:
    """Returns the facts and all tensors by canonical name. Raises UnreadableCheckpoint, UnsupportedModel."""
    try:
        reader = _Reader(files)
        return reader.facts(), dict(reader.tensors())
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UnreadableCheckpoint(f"the GGUF file's metadata lack a usable value: {error}") from error


class _Reader:
    """One file, read by the rules of its architecture."""

    def __init__(self, files: BaseFiles) -> None:
        self._files = files
        self._file = GgufFile.read(files.root)
        if (parts := int(self._field("split.count", 0))) > 1:
            raise UnsupportedModel(
                f"{files.root.name} is one of {parts} parts of a model; join them with `llama-gguf-split --merge`"
            )
        architecture = str(self._field("general.architecture"))
        if architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"architecture {architecture!r} is not supported as GGUF; supported: {', '.join(ARCHITECTURES)}"
            )
        self.form: GgufArchitecture = ARCHITECTURES[architecture]
        self._weights: list[GgufTensor] = [tensor for tensor in self._file.tensors if tensor.name != ROPE_FACTORS]
        self._heads = int(self._option("attention.head_count"))
        self._kv_heads = int(self._option("attention.head_count_kv", self._heads))

    def facts(self) -> BaseFacts:
        """Returns the facts in the metadata."""
        names = [self._canonical(tensor.name) for tensor in self._weights]
        self._refuse_features()
        gemma = self.form.model_type == "gemma3_text"
        hidden, layers = int(self._option("embedding_length")), int(self._option("block_count"))
        head_dim = int(self._option("attention.key_length", 256 if gemma else hidden // self._heads))
        for name in ("attention.value_length", "rope.dimension_count"):
            if int(self._option(name, head_dim)) != head_dim:
                raise UnsupportedModel(
                    f"this {self.form.name} checkpoint has {self.form.name}.{name} {self._option(name)} with heads "
                    f"of {head_dim} features, which the decoder does not compute"
                )
        embedding = next((tensor for tensor in self._weights if tensor.name == "token_embd.weight"), None)
        if embedding is None:
            raise UnreadableCheckpoint("the GGUF file has no token_embd.weight")
        window = int(self._option("attention.sliding_window", 0)) if gemma else 0
        return BaseFacts(
            architecture=self.form.model_type,
            layers=layers,
            hidden=hidden,
            intermediate=int(self._option("feed_forward_length")),
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=head_dim,
            vocabulary=embedding.shape[0],
            context_length=int(self._option("context_length")),
            sha256=UNHASHED,
            form="gguf",
            tied="lm_head" not in names,
            attention_scale=(hidden // self._heads if gemma and layers == GEMMA_27B_LAYERS else head_dim) ** -0.5,
            norm_eps=float(self._option("attention.layer_norm_rms_epsilon")),
            parameters=sum(tensor.elements for tensor in self._weights),
            biases=self.form.biases,
            qk_norm="head" if self.form.qk_norm else None,
            norms=tuple(name for name in get_args(NormPlace) if name in self.form.norms.values()),
            activation="gelu_tanh" if gemma else "silu",
            embedding_scale=hidden**0.5 if gemma else 1.0,
            **self._attention(head_dim, layers, window),
        )

    def _attention(self, head_dim: int, layers: int, window: int) -> dict[str, Any]:
        """Returns the kinds of attention, and each layer's. window: of sliding layers; 0: no layer slides."""
        kinds = [AttentionKind(rope=self._rope(head_dim))]
        if not window:
            return {"attention": tuple(kinds)}
        theta = float(self._option("rope.freq_base_swa", GEMMA_SLIDING_THETA))
        kinds.append(AttentionKind(rope=Rope(theta=theta), window=window))
        return {
            "attention": tuple(kinds),
            "layer_kinds": tuple(int(bool((each + 1) % GEMMA_PATTERN)) for each in range(layers)),
        }

    def tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """Yields every weight with its canonical name."""
        for tensor in self._weights:
            name = self._canonical(tensor.name)
            try:
                tensor.values(rows=1)
            except (NotImplementedError, ValueError) as error:
                raise UnsupportedModel(
                    f"tensor {tensor.name} has the unsupported type {tensor.type.name}; convert the file to another "
                    "type, for example Q8_0"
                ) from error
            heads = {"q_proj": self._heads, "k_proj": self._kv_heads}.get(name.rpartition(".")[2], 0)
            permuted = heads if self.form.interleaved else 0
            yield name, LazyTensor(tensor.shape, partial(_dequantized, tensor, permuted))

    def _field(self, name: str, default: Any = None) -> Any:
        if name in self._file.metadata:
            return self._file.metadata[name]
        if default is None:
            raise UnreadableCheckpoint(f"the GGUF file has no {name}")
        return default

    def _option(self, name: str, default: Any = None) -> Any:
        """Returns an option of the architecture, which may be a list with the same value for each layer."""
        value = self._field(f"{self.form.name}.{name}", default)
        if not isinstance(value, list):
            return value
        if not value or any(each != value[0] for each in value):
            raise UnsupportedModel(
                f"this {self.form.name} checkpoint has another {self.form.name}.{name} in each layer, which the "
                "decoder does not compute"
            )
        return value[0]

    def _rope(self, head_dim: int) -> Rope:
        """Returns the rotary embedding. As in llama.cpp, a factor without a type is linear, a factor of 0 is none."""
        theta = float(self._option("rope.freq_base", 10000.0))
        factor = float(self._option("rope.scaling.factor", self._option("rope.scale_linear", 0.0)))
        linear = factor not in (0.0, 1.0) and self._scaling() == "linear"
        tensor = next((tensor for tensor in self._file.tensors if tensor.name == ROPE_FACTORS), None)
        if tensor is None:
            return Rope(theta=theta, kind="linear", factor=factor) if linear else Rope(theta=theta)
        if linear or tensor.type != GGMLQuantizationType.F32 or tensor.elements != head_dim // 2:
            raise UnsupportedModel(
                f"{ROPE_FACTORS} is not {head_dim // 2} float32 factors of an otherwise unscaled RoPE"
            )
        return Rope(theta=theta, kind="factors", factors=tuple(float(value) for value in tensor.values().reshape(-1)))

    def _scaling(self) -> str:
        return str(self._option("rope.scaling.type", "linear"))

    def _canonical(self, name: str) -> str:
        stem = name.removesuffix(".weight")
        if stem != name and stem in TOP_NAMES:
            return TOP_NAMES[stem]
        match = LAYER_PATTERN.fullmatch(name)
        canonical = self.form.layer_names.get(match[2]) if match else None
        if match is None or canonical is None:
            raise UnsupportedModel(f"tensor {name} is not part of the supported {self.form.name} decoder")
        return f"layers.{match[1]}.{canonical}"

    def _refuse_features(self) -> None:
        scaling = self._scaling()
        attention = float(self._option("rope.scaling.attn_factor", 1.0))
        slides = bool(self._option("attention.sliding_window", 0))
        pattern = self._field(f"{self.form.name}.attention.sliding_window_pattern", GEMMA_PATTERN)
        if pattern == [bool((each + 1) % GEMMA_PATTERN) for each in range(int(self._option("block_count")))]:
            pattern = GEMMA_PATTERN
        gemma = self.form.model_type == "gemma3_text"
        features = {
            f"RoPE scaling {scaling!r}": scaling not in ("none", "linear"),
            f"RoPE attention factor {attention}": attention != 1.0,
            "sliding-window attention": slides and not gemma,
            f"a sliding-window pattern of {pattern}": slides and gemma and pattern != GEMMA_PATTERN,
            "soft caps": any(self._option(f"{name}_logit_softcapping", 0.0) for name in ("attn", "final")),
            "experts": bool(self._option("expert_count", 0)),
        }
        if names := [name for name, present in features.items() if present]:
            raise UnsupportedModel(
                f"this {self.form.name} checkpoint uses {', '.join(names)}, which the decoder does not compute"
            )


def _dequantized(tensor: GgufTensor, heads: int) -> Tensor:
    """Returns a tensor in float32 and in Hugging Face's row order. heads: those whose rows llama.cpp permuted, or 0."""
    import torch

    values = tensor.values()
    return torch.from_numpy(np.ascontiguousarray(_unpermute(values, heads) if heads else values))


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows (heads * head_dim, in) in Hugging Face's order: llama.cpp interleaves the rotary halves."""
    out_features, in_features = rows.shape
    pairs = rows.reshape(heads, out_features // heads // 2, 2, in_features)
    return pairs.swapaxes(1, 2).reshape(out_features, in_features)
