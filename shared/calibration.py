"""A calibration: the directions of each linear layer's input that matter most, from which a recipe may take its A.

The paper draws A at random. With LoRA-FA the gradient of B is A^T dL/dW: what A does not span, B cannot learn, and
every further column adds `out` parameters of noise to a zeroth-order step. A calibration is made once per base and task
from data that is nobody's (`mobizo-server calibrate`); a recipe names it by the sha256 of its file and takes the first
r directions of every module. Orthonormal columns are divided by sqrt 3, so that A has the energy that a random A of
that rank has on average (`shared.lora.init_a`: U(-1, 1) / sqrt(in) has r / 3).

Knows no torch, no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic
import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from shared.canonical import canonical_json, sha256_hex
from shared.errors import InvalidRecipe, InvalidUpload
from shared.recipe import BaseRef

F32 = NDArray[np.float32]
Kind = Literal["gradients", "activations"]

MOST_BYTES = 1 << 30
_METADATA = "mobizo"
_ORTHONORMAL = 1e-3  # most that an entry of D^T D may differ from the identity's


class CalibrationAbout(BaseModel):
    """What a calibration was made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    base: BaseRef
    kind: Kind = Field(
        description="right singular vectors, over the examples, of the loss's gradients by the weight, or of its inputs"
    )
    task: str = Field(min_length=1, max_length=200, description="name of the task that made records into prompts")
    examples: int = Field(ge=1, description="records it was made of")


@dataclass(frozen=True)
class Calibration:
    """Directions by module. directions: transformers' name of a module -> float32 (in, width), the first the strongest;
    columns are orthonormal."""

    about: CalibrationAbout
    directions: Mapping[str, F32]
    sha256: str  # of the file

    @property
    def width(self) -> int:
        """The largest rank that every module has directions for, or all that a smaller input has."""
        return max(int(found.shape[1]) for found in self.directions.values())

    def a(self, name: str, rank: int) -> F32:
        """The frozen A of one module, float32 (in, rank). Raises InvalidRecipe if there are too few directions."""
        found = self.directions.get(name)
        if found is None:
            raise InvalidRecipe(f"calibration: it has no directions for {name}; make one that covers it")
        if found.shape[1] < rank:
            raise InvalidRecipe(f"calibration: it has {found.shape[1]} directions for {name}; rank is {rank}")
        a: F32 = np.ascontiguousarray(found[:, :rank]) / np.float32(np.sqrt(3))
        return a


def dump_calibration(about: CalibrationAbout, directions: Mapping[str, F32]) -> bytes:
    """A safetensors file of one float32 tensor a module; equal contents make equal bytes."""
    tensors = {name: np.ascontiguousarray(directions[name], "<f4") for name in sorted(directions)}
    return safetensors.numpy.save(tensors, {_METADATA: canonical_json(about.model_dump(mode="json")).decode()})


def load_calibration(data: bytes) -> Calibration:
    """The contents of a calibration file, checked before they are believed.

    Raises InvalidUpload naming what is wrong: form, metadata, dtype, shape, not finite, columns not orthonormal.
    """
    if len(data) > MOST_BYTES:
        raise InvalidUpload(f"the calibration has {len(data)} bytes; at most {MOST_BYTES} are taken")
    try:
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # the package ships no types
    except safetensors.SafetensorError as error:
        raise InvalidUpload(f"the calibration is not a whole safetensors file ({error})") from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    try:
        about = CalibrationAbout.model_validate_json((header.get("__metadata__") or {})[_METADATA])
    except (KeyError, TypeError, pydantic.ValidationError) as error:
        raise InvalidUpload("the calibration does not say what it was made of: make it with `calibrate`") from error
    directions = {name: _directions(name, entry) for name, entry in tensors}
    if not directions:
        raise InvalidUpload("the calibration holds no directions")
    return Calibration(about, directions, sha256_hex(data))


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file. Raises InvalidUpload as above, or if the file cannot be read."""
    try:
        return load_calibration(path.read_bytes())
    except OSError as error:
        raise InvalidUpload(f"{path}: the calibration cannot be read ({error.strerror})") from error


def _directions(name: str, entry: Mapping[str, object]) -> F32:
    shape = entry["shape"]
    if entry["dtype"] != "F32" or not isinstance(shape, list) or len(shape) != 2 or not 0 < shape[1] <= shape[0]:
        raise InvalidUpload(f"calibration of {name}: {entry['dtype']} {shape}; it must be F32 [in, width], width <= in")
    found: F32 = np.frombuffer(entry["data"], "<f4").astype(np.float32).reshape(shape)  # type: ignore[call-overload]
    if not np.isfinite(found).all():
        raise InvalidUpload(f"calibration of {name}: values that are not finite")
    # Large values first: their squares overflow.
    large = np.abs(found).max() > 2
    if large or np.abs(found.T @ found - np.eye(shape[1], dtype=np.float32)).max() > _ORTHONORMAL:
        raise InvalidUpload(f"calibration of {name}: its columns are not orthonormal")
    return found
