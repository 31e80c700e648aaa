"""Reads a checkpoint in GGUF format, one file of metadata and (quantized) tensors. Architectures: `gguf_names`.

The metadata are read as the options of a config.json, by the table of architectures. Blocks are dequantized, and rows
of queries and keys are put into the order of the decoder. Tensors are read one at a time. Tensors and settings that the
decoder does not use are rejected. torch is imported when a tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from pydantic import ValidationError

from server.compiler.checkpoints.architectures import CONVOLUTION, FULL, Architecture, architecture_of, check_supported
from server.compiler.checkpoints.base import UNHASHED, AttentionKind, BaseFacts, BaseFiles, Rope
from server.compiler.checkpoints.gguf_file import GgufFile, GgufTensor, can_dequantize
from server.compiler.checkpoints.gguf_names import (
    ARCHITECTURES,
    CONVOLUTION_KERNEL,
    FACTORS,
    GATE_UP,
    KV_HEADS,
    ORIGINAL_CONTEXT,
    SIZES,
    SOFTCAPS,
    TAPS,
    TOP_NAMES,
    GgufArchitecture,
    gguf_rows,
)
from server.compiler.checkpoints.hf import absent_biases
from server.compiler.checkpoints.hf_config import config_facts
from server.compiler.checkpoints.lazy import LazyTensor
from shared.errors import UnreadableCheckpoint, UnsupportedModel
from shared.invalid_fields import first_invalid
from shared.recipe import TARGETS

if TYPE_CHECKING:
    from torch import Tensor

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's RoPE scaling, computed by llama.cpp's converter
LONG_ROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
RAMP = {"beta_fast": 32.0, "beta_slow": 1.0}
Index = tuple[NDArray[np.int64] | slice | int, ...]
TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(.+)\.(weight|bias)")


def gguf_checkpoint(files: BaseFiles) -> tuple[BaseFacts, dict[str, LazyTensor]]:
    """Returns the facts and all tensors by canonical name. Raises UnreadableCheckpoint, UnsupportedModel."""
    try:
        reader = _Reader(files)
        facts = reader.facts()
        return facts, {**absent_biases(facts), **dict(reader.tensors(facts))}
    except ValidationError as error:
        raise UnreadableCheckpoint(f"the GGUF file's metadata lack a usable value: {first_invalid(error)}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UnreadableCheckpoint(f"the GGUF file's metadata lack a usable value: {error}") from error


class _Reader:
    """One file, read by the rules of its architecture."""

    def __init__(self, files: BaseFiles) -> None:
        self._file = GgufFile.read(files.root)
        if (parts := int(self._field("split.count", 0))) > 1:
            raise UnsupportedModel(
                f"{files.root.name} is one of {parts} parts of a model; join them with `llama-gguf-split --merge`"
            )
        name = str(self._field("general.architecture"))
        if name not in ARCHITECTURES:
            raise UnsupportedModel(
                f"architecture {name!r} is not supported as GGUF; supported: {', '.join(ARCHITECTURES)}"
            )
        self.form: GgufArchitecture = ARCHITECTURES[name]
        self._model_type = self.form.sliding_type if self.form.sliding_type and self._window() else self.form.model_type
        self._architecture: Architecture = architecture_of(self._model_type)
        self._tensors = {tensor.name: tensor for tensor in self._file.tensors}
        of_rope = (ROPE_FACTORS, *LONG_ROPE.values())
        self._weights = [tensor for tensor in self._file.tensors if tensor.name not in of_rope]

    def facts(self) -> BaseFacts:
        """Returns the facts in the metadata."""
        facts = BaseFacts(
            **config_facts(self._config()),
            sha256=UNHASHED,
            form="gguf",
            parameters=sum(tensor.elements for tensor in self._weights),
        )
        self._refuse_features(facts)
        names = [name for tensor in self._weights for name in self._canonical(tensor.name)]
        found: dict[str, Any] = {"tied": "lm_head" not in names}
        if "biases" not in self._architecture.facts:
            found["biases"] = tuple(target for target in TARGETS if f"layers.0.{target}_bias" in names)
        if ROPE_FACTORS in self._tensors:
            found["attention"] = (self._by_factors(facts), *facts.attention[1:])
        return facts.model_copy(update=found)

    def tensors(self, facts: BaseFacts) -> Iterator[tuple[str, LazyTensor]]:
        """Yields every weight with its canonical name."""
        for tensor in self._weights:
            if not can_dequantize(tensor.type):
                raise UnsupportedModel(
                    f"tensor {tensor.name} has the unsupported type {tensor.type.name}; convert the file to another "
                    "type, for example Q8_0"
                )
            names = self._canonical(tensor.name)
            layer = names[0].rpartition(".")[0].removeprefix("layers.")
            kind = facts.of_layer(int(layer)) if layer else facts
            targets = [name.rpartition(".")[2].removesuffix("_bias") for name in names]
            widths = [kind.features(target)[1] for target in targets if target in TARGETS]
            for place, (name, target) in enumerate(zip(names, targets, strict=True)):
                shape = tensor.shape
                index: Index | None = None
                if len(names) > 1 and shape[0] == sum(widths):
                    shape = (widths[place], *shape[1:])
                if target in TARGETS:
                    rows = gguf_rows(self.form, kind, target) + sum(widths[:place])
                    index = None if np.array_equal(rows, np.arange(tensor.shape[0])) else (rows,)
                elif kind.convolves and target in kind.mixer_vectors and shape[1:] == (len(names),):
                    shape, index = shape[:1], (slice(None), place)
                factor = facts.logits_scale if name in facts.final_norms else 1.0
                yield name, LazyTensor(shape, partial(_dequantized, tensor, index, factor))

    def _config(self) -> dict[str, Any]:
        """Returns the metadata as the config.json of the architecture."""
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise UnreadableCheckpoint("the GGUF file has no token_embd.weight")
        sizes = {option: int(self._option(name)) for name, option in SIZES.items()}
        heads, epsilon = sizes["num_attention_heads"], "attention.layer_norm_rms_epsilon"
        mean_width = sizes["hidden_size"] // heads
        head_dim = int(self._option("attention.key_length", mean_width))
        by_mean_width = sizes["num_hidden_layers"] == self.form.mean_width_layers
        if self._architecture.facts.get("norm") == "layer":
            epsilon = "attention.layer_norm_epsilon"
        theta = float(self._option("rope.freq_base", 10000.0))
        options: dict[str, Any] = {
            **sizes,
            **{option: self._option(name) for name, option in self.form.options.items() if self._has(name)},
            "vocab_size": embedding.shape[0],
            "num_key_value_heads": int(self._option(KV_HEADS, heads)),
            "head_dim": head_dim,
            "rms_norm_eps": float(self._option(epsilon)),
            "query_pre_attn_scalar": mean_width if by_mean_width else head_dim,
            "sliding_window": self._window() or None,
            "rope_theta": theta,
            "rope_local_base_freq": float(self._option("rope.freq_base_swa", self.form.sliding_theta or theta)),
            "partial_rotary_factor": self._rotary_share(head_dim),
            "rope_scaling": self._rope_scaling(),
            "rope_parameters": None,
            "layer_types": self._layer_types(),
            **self.form.computed,
        }
        if self._has(ORIGINAL_CONTEXT) and self._long_rope():
            options["original_max_position_embeddings"] = self._option(ORIGINAL_CONTEXT)
        spelling = {usual: own for own, usual in self._architecture.spelling.items()}
        config = {spelling.get(option, option): value for option, value in options.items()}
        return {"model_type": self._model_type, **config}

    def _layer_types(self) -> list[str] | None:
        """Returns what each layer has, attention or a convolution; None for a file without convolutions."""
        counts = self._file.metadata.get(f"{self.form.name}.{KV_HEADS}")
        if not self._has(TAPS) or not isinstance(counts, list):
            return None
        return [FULL if count else CONVOLUTION for count in counts]

    def _window(self) -> int:
        """Returns the attention window of sliding layers; 0: no layer slides."""
        return int(self._option("attention.sliding_window", self.form.window))

    def _rotary_share(self, head_dim: int) -> float | None:
        """Returns the share of a head's features that are rotated; None for all of them."""
        for name in ("attention.value_length", "rope.dimension_count"):
            size = int(self._option(name, head_dim))
            partial_rotary = name.startswith("rope") and self._architecture.rotary_share is not None
            if size != head_dim and not partial_rotary:
                raise UnsupportedModel(
                    f"this {self.form.name} checkpoint has {self.form.name}.{name} {size} with heads of {head_dim} "
                    "features, which the decoder does not compute"
                )
        return None if self._architecture.rotary_share is None else size / head_dim

    def _rope_scaling(self) -> dict[str, Any] | None:
        """Returns the scaling. As in llama.cpp, a factor without a type is linear, and a factor of 0 is none."""
        if self._long_rope():
            factors = {name: self._tensors[tensor].values().tolist() for name, tensor in LONG_ROPE.items()}
            return {"type": "longrope", **factors, "attention_factor": self._attention_factor()}
        kind = self._scaling()
        factor = float(self._option("rope.scaling.factor", self._option("rope.scale_linear", 0.0)))
        if factor in (0.0, 1.0) or kind not in ("linear", "yarn"):
            return None
        scaling = {"type": kind, "factor": factor}
        if kind == "yarn":
            scaling |= {name: float(self._option(f"rope.scaling.yarn_{name}", value)) for name, value in RAMP.items()}
            scaling["original_max_position_embeddings"] = int(self._option(ORIGINAL_CONTEXT))
            # llama.cpp's attention factor: as if `mscale` were 1.
            all_dim = float(self._option("rope.scaling.yarn_log_multiplier", 0.0))
            scaling |= {"mscale": 1.0, "mscale_all_dim": all_dim}
        return scaling

    def _long_rope(self) -> bool:
        return all(tensor in self._tensors for tensor in LONG_ROPE.values())

    def _scaling(self) -> str:
        return str(self._option("rope.scaling.type", "linear"))

    def _attention_factor(self) -> float:
        return float(self._option("rope.scaling.attn_factor", 1.0))

    def _by_factors(self, facts: BaseFacts) -> AttentionKind:
        """Returns the first kind of attention, whose RoPE the tensor ROPE_FACTORS scales."""
        tensor, kind = self._tensors[ROPE_FACTORS], facts.attention[0]
        float32 = tensor.type == GGMLQuantizationType.F32
        if kind.rope is None or kind.rope.kind != "default" or not float32 or tensor.elements != facts.head_dim // 2:
            raise UnsupportedModel(
                f"{ROPE_FACTORS} is not {facts.head_dim // 2} float32 factors of an otherwise unscaled RoPE"
            )
        factors = tuple(float(value) for value in tensor.values().reshape(-1))
        return AttentionKind(rope=Rope(theta=kind.rope.theta, kind="factors", factors=factors), window=kind.window)

    def _canonical(self, name: str) -> list[str]:
        """Returns the canonical names of what the tensor `name` holds."""
        match = TENSOR_NAME.fullmatch(name)
        if match is not None:
            layer, stem, kind = match.groups()
            ending = "_bias" if kind == "bias" else ""
            if layer is None and stem in TOP_NAMES:
                return [TOP_NAMES[stem] + ending]
            if layer is not None and stem in self.form.norms:
                return [f"layers.{layer}.{self.form.norms[stem]}{ending}"]
            if layer is not None and stem == CONVOLUTION_KERNEL and kind == "weight" and self._has(TAPS):
                return [f"layers.{layer}.tap_{tap}" for tap in range(int(self._option(TAPS)))]
            if layer is not None and stem in self.form.linears:
                gated = self._architecture.facts.get("gated", True)
                joined = stem == "ffn_up" and gated and f"blk.{layer}.ffn_gate.weight" not in self._tensors
                return [
                    f"layers.{layer}.{target}{ending}" for target in (GATE_UP if joined else self.form.linears[stem])
                ]
        raise UnsupportedModel(f"tensor {name} is not part of the supported {self.form.name} decoder")

    def _refuse_features(self, facts: BaseFacts) -> None:
        scaling, window, long = self._scaling(), self._window(), self._long_rope()
        pattern = self._file.metadata.get(f"{self.form.name}.attention.sliding_window_pattern")
        every = self._architecture.defaults.get("sliding_window_pattern")
        usual = (None, every, [bool((layer + 1) % every) for layer in range(facts.layers)] if every else every)
        factors = {name: self._option(name, 1) for name in FACTORS if name not in self.form.options}
        usual_factor = 1.0 if facts.attention[0].rope is None else facts.attention[0].rope.attention_factor
        yarn = {"attn": usual_factor, "ext": 1.0}  # llama.cpp overrides another attention factor
        found = {name: float(self._option(f"rope.scaling.yarn_{name}_factor", value)) for name, value in yarn.items()}
        features = {
            f"RoPE scaling {scaling!r}": scaling not in ("none", "linear", "yarn", *(["longrope"] if long else [])),
            f"RoPE attention factor {self._attention_factor()}": self._attention_factor() != 1.0 and not long,
            **{f"YaRN's {name}_factor {value}": abs(value - yarn[name]) > 1e-4 for name, value in found.items()},
            "sliding-window attention": 0 < window < facts.context_length and not facts.windowed,
            f"a sliding-window pattern of {pattern}": window > 0 and pattern not in usual,
            "soft caps": any(self._option(name, 0.0) for name in SOFTCAPS if name not in self.form.options),
            "experts": bool(self._option("expert_count", 0)),
            **{f"{name} {value}": value not in (0, 1) for name, value in factors.items()},
        }
        check_supported(self.form.name, [name for name, present in features.items() if present])

    def _has(self, name: str) -> bool:
        return f"{self.form.name}.{name}" in self._file.metadata

    def _field(self, name: str, default: Any = None) -> Any:
        if name in self._file.metadata:
            return self._file.metadata[name]
        if default is None:
            raise UnreadableCheckpoint(f"the GGUF file has no {name}")
        return default

    def _option(self, name: str, default: Any = None) -> Any:
        """Returns an option of the architecture, which may be a list with the same value for each layer that has it."""
        value = self._field(f"{self.form.name}.{name}", default)
        if not isinstance(value, list):
            return value
        value = [each for each in value if each or name != KV_HEADS] if self._layer_types() else value
        if not value or any(each != value[0] for each in value):
            raise UnsupportedModel(
                f"this {self.form.name} checkpoint has another {self.form.name}.{name} in each layer, which the "
                "decoder does not compute"
            )
        return value[0]


def _dequantized(tensor: GgufTensor, index: Index | None, factor: float) -> Tensor:
    """Returns a part of a tensor in float32, times a factor. index: of that part; None: all."""
    import torch

    values = tensor.values() if index is None else tensor.values()[index]
    return torch.from_numpy(np.ascontiguousarray(values if factor == 1.0 else values * np.float32(factor)))
