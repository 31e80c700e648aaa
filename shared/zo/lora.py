"""LoRA-FA's matrices: the layout of B in the flat vector, the frozen A, and the adapter file.

All B matrices of a program are views of one float32 vector of length D: layer by layer, and within a layer the recipe's
targets in canonical order, each (r, out) row-major. A (in, r) is drawn from the recipe's a_seed or taken from the
calibration that the recipe names.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import Field

from shared.canonical import canonical_json
from shared.errors import InvalidRecipe, InvalidUpload
from shared.recipe import TARGETS, Recipe, Target
from shared.strict_model import StrictModel
from shared.zo.calibration import Calibration
from shared.zo.noise import DOMAIN_A, stream_key, threefry2x32, uniform

F32 = NDArray[np.float32]

ADAPTER_TENSOR = "lora_B"
HEADER_BYTES = 4096  # largest size of an adapter file beyond its 4 D bytes
_BLOCK = 1 << 18  # elements that are checked at once


def head_order(head_dim: int, rotary_dim: int | None, interleaved: bool) -> NDArray[np.int64]:
    """Returns, for each feature of a head here, its place in the base's own files, (head_dim,).

    Here, feature i forms a pair with feature i + head_dim / 2, and pairs that are rotated come first.
    """
    rotated = np.arange(rotary_dim or head_dim)
    halves = rotated.reshape(-1, 2).T if interleaved else rotated.reshape(2, -1)
    rest = np.arange(len(rotated), head_dim).reshape(2, -1)
    return np.concatenate((halves, rest), axis=1).reshape(-1)


class BaseShape(StrictModel):
    """The dimensions of a base model on which LoRA and the inputs depend."""

    architecture: str
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    intermediate: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    context_length: int = Field(ge=1)
    gated: bool = Field(True, description="the MLP multiplies by a gate; without one there is no gate_proj")
    # Omitted where a head is rotated as a whole, by halves, so that the signatures of older manifests stay valid.
    rotary_dim: int | None = Field(
        None,
        ge=2,
        exclude_if=lambda features: features is None,
        description="features of a head that are rotated, if not all are",
    )
    interleaved: bool = Field(
        False,
        exclude_if=lambda neighbours: not neighbours,
        description="the base's own files pair neighbouring features of a head for rotation, not those of two halves",
    )
    conv_layers: tuple[int, ...] = Field(
        (),
        exclude_if=lambda layers: not layers,
        description="layers that have a gated short convolution instead of attention; its input gate counts as k_proj, "
        "its input as v_proj, its output gate as q_proj, and its output layer as o_proj",
    )

    @property
    def convolves(self) -> bool:
        """Whether every layer has a gated short convolution. It is meant for the shape of one layer, see `of_layer`."""
        return len(self.conv_layers) == self.layers

    def of_layer(self, layer: int) -> Self:
        """Returns the shape of a base with this layer alone. A convolution counts as one head of the hidden size."""
        if not self.conv_layers:
            return self
        if layer not in self.conv_layers:
            return self.model_copy(update={"layers": 1, "conv_layers": ()})
        one_head = {"heads": 1, "kv_heads": 1, "head_dim": self.hidden}
        return self.model_copy(update={"layers": 1, "conv_layers": (0,), **one_head})

    def of_layers(self, first: int = 0) -> list[Self]:
        """Returns `of_layer` of each layer from `first` on."""
        return [self.of_layer(layer) for layer in range(first, self.layers)]

    @property
    def cached_features(self) -> int:
        """Numbers of one token that a text's cache holds: keys and values, or the input of a convolution."""
        kinds = self.of_layers()
        return sum(kind.hidden if kind.convolves else 2 * kind.kv_heads * kind.head_dim for kind in kinds)

    @property
    def layer_weights(self) -> tuple[int, ...]:
        """Elements of the linear weights of each layer."""
        kinds = self.of_layers()
        return tuple(sum(math.prod(kind.features(target)) for target in kind.linears) for kind in kinds)

    @property
    def linears(self) -> tuple[Target, ...]:
        """The linear layers of one decoder layer that may be targets."""
        return tuple(target for target in TARGETS if self.gated or target != "gate_proj")

    def features(self, target: Target) -> tuple[int, int]:
        """Returns (in, out) of one target."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }[target]


@dataclass(frozen=True)
class ModuleNames:
    """What transformers calls the linear layers of an architecture's decoder, where that differs from Llama."""

    layers: str = "model.layers"  # path of the list of decoder layers
    attention: str = "self_attn"
    names: Mapping[str, str] = field(default_factory=dict)  # target -> path within a layer
    fused: Mapping[str, tuple[Target, ...]] = field(default_factory=dict)  # path -> targets that it holds as one
    by_head: bool = False  # a fused module alternates its targets' rows from head to head
    convolution: ModuleNames | None = None  # of layers that have a convolution


_QKV: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj")
_GATE_UP: Mapping[str, tuple[Target, ...]] = {"mlp.gate_up_proj": ("gate_proj", "up_proj")}
_W123: Mapping[str, str] = {
    "gate_proj": "feed_forward.w1",
    "up_proj": "feed_forward.w3",
    "down_proj": "feed_forward.w2",
}
_LANGUAGE_MODEL = ModuleNames("model.language_model.layers")
MODULE_NAMES: Mapping[str, ModuleNames] = {
    "opt": ModuleNames(
        "model.decoder.layers", names={"o_proj": "self_attn.out_proj", "up_proj": "fc1", "down_proj": "fc2"}
    ),
    "gemma3": _LANGUAGE_MODEL,
    "mistral3": _LANGUAGE_MODEL,
    "phi3": ModuleNames(fused={"self_attn.qkv_proj": _QKV, **_GATE_UP}),
    "glm": ModuleNames(fused=_GATE_UP),
    "glm4": ModuleNames(fused=_GATE_UP),
    "starcoder2": ModuleNames(names={"up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"}),
    "gpt_neox": ModuleNames(
        "gpt_neox.layers",
        "attention",
        {"o_proj": "attention.dense", "up_proj": "mlp.dense_h_to_4h", "down_proj": "mlp.dense_4h_to_h"},
        {"attention.query_key_value": _QKV},
        by_head=True,
    ),
    "gpt2": ModuleNames(
        "transformer.h",
        "attn",
        {"o_proj": "attn.c_proj", "up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"},
        {"attn.c_attn": _QKV},
    ),
    "lfm2": ModuleNames(
        names={**_W123, "o_proj": "self_attn.out_proj"},
        convolution=ModuleNames(
            attention="conv",
            names={**_W123, "o_proj": "conv.out_proj"},
            fused={"conv.in_proj": ("k_proj", "q_proj", "v_proj")},
        ),
    ),
}


def module_names(shape: BaseShape) -> ModuleNames:
    """Returns the names of a layer's linear layers. shape: of one layer, if the base's layers differ."""
    names = MODULE_NAMES.get(shape.architecture, ModuleNames())
    return names.convolution if names.convolution and shape.convolves else names


def hf_module_name(shape: BaseShape, target: Target) -> str:
    """Returns the path of a target within a decoder layer of the model in transformers. shape: as `module_names`.

    A target that is part of a fused module has the name that it would have by itself; see `file_rows`.
    """
    own = module_names(shape)
    parent = own.attention if target in (*_QKV, "o_proj") else "mlp"
    return own.names.get(target, f"{parent}.{target}")


def file_rows(shape: BaseShape, target: Target) -> tuple[str, NDArray[np.int64] | None]:
    """Returns the module within a layer that holds a target in the base's own files, and the place of its rows there.

    The rows (out,) are those of the module's weight, for each row of the target here; None: the same rows. shape: as
    `module_names`.
    """
    names = module_names(shape)
    rows = np.arange(shape.features(target)[1])
    if target in ("q_proj", "k_proj") and not shape.convolves:
        order = head_order(shape.head_dim, shape.rotary_dim, shape.interleaved)
        rows = rows.reshape(-1, shape.head_dim)[:, order].reshape(-1)
    for module, targets in names.fused.items():
        if target not in targets:
            continue
        if names.by_head:
            dim, place = shape.head_dim, targets.index(target)
            rows = rows // dim * (len(targets) * dim) + place * dim + rows % dim
        else:
            rows = rows + sum(shape.features(each)[1] for each in targets[: targets.index(target)])
        return module, rows
    same = bool((rows == np.arange(len(rows))).all())
    return hf_module_name(shape, target), None if same else rows


@dataclass(frozen=True)
class LoraModule:
    """One adapted linear layer and its slice of flat B: B[offset : offset + rank * out] is (rank, out)."""

    index: int
    layer: int
    target: Target
    name: str  # the module's path in transformers' model
    in_features: int
    out_features: int
    rank: int
    offset: int

    @property
    def size(self) -> int:
        """Number of elements of this module's B."""
        return self.rank * self.out_features

    def b(self, flat: F32) -> F32:
        """Returns this module's B, float32 (rank, out), as a view of flat B (D,)."""
        return flat[self.offset : self.offset + self.size].reshape(self.rank, self.out_features)


def lora_modules(recipe: Recipe, shape: BaseShape) -> tuple[LoraModule, ...]:
    """Returns every adapted linear layer in flat-B order.

    Raises InvalidRecipe if the base lacks a layer or a target.
    """
    if missing := [target for target in recipe.targets if target not in shape.linears]:
        raise InvalidRecipe(f"targets names {missing[0]}; a {shape.architecture} layer has {', '.join(shape.linears)}")
    parent = module_names(shape).layers
    modules: list[LoraModule] = []
    offset = 0
    for layer in recipe.adapted_layers(shape.layers):
        kind = shape.of_layer(layer)
        for target in recipe.targets:
            in_features, out_features = kind.features(target)
            name = f"{parent}.{layer}.{hf_module_name(kind, target)}"
            module = LoraModule(len(modules), layer, target, name, in_features, out_features, recipe.rank, offset)
            modules.append(module)
            offset += module.size
    return tuple(modules)


def flat_size(recipe: Recipe, shape: BaseShape) -> int:
    """Returns D, the number of elements of flat B."""
    last = lora_modules(recipe, shape)[-1]
    return last.offset + last.size


def init_a(recipe: Recipe, module: LoraModule) -> F32:
    """Returns the random frozen A of one module, float32 (in, r): kaiming_uniform(a=sqrt 5), i.e. U(-1, 1) / sqrt(in).

    A is drawn from a counter-based generator, so it is the same on every machine.
    """
    words = threefry2x32(stream_key(recipe.a_seed, DOMAIN_A), module.index, 0)
    values = uniform((int(words[0][0]), int(words[1][0])), module.in_features * module.rank)
    bound = np.float32(1 / np.sqrt(module.in_features))
    return (values * bound).reshape(module.in_features, module.rank)


def frozen_a(recipe: Recipe, module: LoraModule, calibration: Calibration | None = None) -> F32:
    """Returns the frozen A of one module, float32 (in, r), drawn from the seed or taken from the recipe's calibration.

    Raises InvalidRecipe if the calibration is missing, is not the one that the recipe names, or has another base or
    shape.
    """
    if recipe.calibration is None:
        return init_a(recipe, module)
    if calibration is None or calibration.sha256 != recipe.calibration:
        raise InvalidRecipe(f"calibration {recipe.calibration[:12]}... is not available; the recipe's A depends on it")
    if calibration.metadata.base.sha256 != recipe.base.sha256:
        raise InvalidRecipe(
            f"the calibration was created for base {calibration.metadata.base.name}, not {recipe.base.name}"
        )
    a = calibration.a(module.name, recipe.rank)
    if len(a) != module.in_features:
        raise InvalidRecipe(f"calibration: {module.name} has {module.in_features} inputs, the calibration {len(a)}")
    return a


def a_fingerprint(recipe: Recipe, shape: BaseShape, calibration: Calibration | None = None) -> str:
    """Returns the sha256 over every A in flat-B order, little-endian float32.

    Adapters may be averaged only if their fingerprints are equal.
    """
    digest = hashlib.sha256()
    for module in lora_modules(recipe, shape):
        digest.update(frozen_a(recipe, module, calibration).astype("<f4").tobytes())
    return digest.hexdigest()


def dump_adapter(flat: F32, metadata: Mapping[str, str]) -> bytes:
    """Returns flat B (D,) as a safetensors file with one float32 tensor `lora_B`, at most 4 D + 4096 bytes."""
    return safetensors.numpy.save({ADAPTER_TENSOR: np.ascontiguousarray(flat, "<f4")}, dict(metadata))


def adapter_file(flat: F32, *, job_id: str, recipe_id: str, a_sha256: str, step: int) -> bytes:
    """Returns flat B (D,) after `step` steps of a run as an adapter file.

    Equal runs give equal bytes on every machine.
    """
    metadata = {"format": 1, "job_id": job_id, "recipe_id": recipe_id, "a_sha256": a_sha256, "step": step}
    # A single metadata entry, because safetensors writes several entries in no fixed order.
    return dump_adapter(flat, {"mobizo": canonical_json(metadata).decode()})


def split_adapter(data: bytes, size: int) -> tuple[bytes, bytes]:
    """Splits a valid adapter file into its header and its `size` float32 numbers."""
    return data[: len(data) - 4 * size], data[len(data) - 4 * size :]


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise InvalidUpload("the adapter's header has a duplicate name, which readers would interpret differently")
    return dict(pairs)


def _header(data: bytes) -> bytes:
    """Returns the header's JSON text. Raises InvalidUpload if it is longer than HEADER_BYTES."""
    length = int.from_bytes(data[:8], "little")
    if length > HEADER_BYTES:
        raise InvalidUpload(f"the adapter's header has {length} bytes; at most {HEADER_BYTES} are allowed")
    return data[8 : 8 + length]


def named_fingerprint(data: bytes) -> str | None:
    """Returns the fingerprint of A that a valid adapter file names in its metadata, or None."""
    metadata = json.loads(_header(data)).get("__metadata__") or {}
    try:
        return str(json.loads(metadata["mobizo"])["a_sha256"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def load_adapter(data: bytes, size: int) -> F32:
    """Parses and validates an adapter file. Returns flat B, float32 (size,).

    Raises InvalidUpload, naming the problem: length, file format, header, tensor names, dtype, shape or non-finite
    values.
    """
    _check_length(len(data), size)
    header = _header(data)
    with _incomplete_is_invalid():
        tensors = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]  # the package ships no types
    json.loads(header, object_pairs_hook=_unique_pairs)
    _check_names(tensors)
    entry = tensors[ADAPTER_TENSOR]
    _check_tensor(entry["dtype"], entry["shape"], size)
    flat = np.frombuffer(entry["data"], "<f4").astype(np.float32)
    _check_finite(flat)
    return flat


def map_adapter(path: Path, size: int) -> F32:
    """Like `load_adapter`, for a file that is not read into memory. The result is a read-only view of it."""
    _check_length(path.stat().st_size, size)
    with path.open("rb") as file:
        header = _header(file.read(8 + HEADER_BYTES))
    with _incomplete_is_invalid():
        tensors: Any = safetensors.safe_open(path, framework="np")
    json.loads(header, object_pairs_hook=_unique_pairs)
    _check_names(tensors.keys())
    entry = tensors.get_slice(ADAPTER_TENSOR)
    _check_tensor(entry.get_dtype(), entry.get_shape(), size)
    flat: F32 = np.memmap(path, "<f4", "r", offset=8 + len(header), shape=(size,))
    _check_finite(flat)
    return flat


def _check_length(length: int, size: int) -> None:
    if length > 4 * size + HEADER_BYTES:
        raise InvalidUpload(
            f"the adapter has {length} bytes; at most {4 * size + HEADER_BYTES} are allowed for this program"
        )


@contextmanager
def _incomplete_is_invalid() -> Iterator[None]:
    try:
        yield
    except safetensors.SafetensorError as error:
        raise InvalidUpload(f"the adapter is not a complete safetensors file ({error}); send it again") from error


def _check_names(names: Iterable[str]) -> None:
    if (found := sorted(names)) != [ADAPTER_TENSOR]:
        raise InvalidUpload(
            f"the adapter contains the tensors {found}; it must contain exactly one, {ADAPTER_TENSOR!r}"
        )


def _check_tensor(dtype: str, shape: Iterable[int], size: int) -> None:
    if dtype != "F32":
        raise InvalidUpload(f"{ADAPTER_TENSOR} has dtype {dtype}; it must be F32")
    if list(shape) != [size]:
        raise InvalidUpload(f"{ADAPTER_TENSOR} has shape {list(shape)}; this program's is [{size}]")


def _check_finite(flat: F32) -> None:
    if not all(np.isfinite(flat[at : at + _BLOCK]).all() for at in range(0, flat.size, _BLOCK)):
        raise InvalidUpload(f"{ADAPTER_TENSOR} has values that are not finite; training diverged: lower lr")
