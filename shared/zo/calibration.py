"""Calibrations: for each linear layer, the input directions that matter most, from which a recipe may take its A.

The paper draws A at random. In LoRA-FA the gradient of B is A^T dL/dW, so B cannot learn anything outside the span of
A, and every further column adds `out` noisy parameters to a zeroth-order step. A calibration is computed once for a
base model and a task from public data (`mobizo-server calibrate`). A recipe names it by the sha256 of its file and
takes the first r directions of every module. The orthonormal columns are divided by sqrt 3, so that A has the same mean
energy as a random A of that rank (`shared.zo.lora.init_a`: U(-1, 1) / sqrt(in) has r / 3). A balanced calibration also
scales each module's A so that gradients of B are equally large in all modules. Steps of one rate, which zeroth order
takes, then move all modules alike, as Adam does by its second moments.
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
from pydantic import Field, field_validator

from shared.canonical import canonical_json, sha256_hex
from shared.errors import InvalidRecipe, InvalidUpload
from shared.recipe import BaseRef
from shared.strict_model import StrictModel

F32 = NDArray[np.float32]
Kind = Literal["gradients", "activations"]

MAX_BYTES = 1 << 30
MIN_SCALE = 1e-4
_METADATA = "mobizo"
_ORTHONORMAL = 1e-3  # largest difference between an entry of D^T D and the identity


class CalibrationMetadata(StrictModel):
    """The metadata of a calibration."""

    format: Literal[1] = 1
    base: BaseRef
    kind: Kind = Field(
        description="right singular vectors, over the examples, of the loss's gradients by the weight, or of its inputs"
    )
    task: str = Field(min_length=1, max_length=200, description="name of the task that turned records into prompts")
    examples: int = Field(ge=1, description="number of records it was computed from")
    # Omitted when absent, so that older calibrations keep their bytes.
    scales: dict[str, float] | None = Field(
        None, exclude_if=lambda scales: scales is None, description="factor of each module's A; absent: 1 for all"
    )

    @field_validator("scales")
    @classmethod
    def _positive(cls, scales: dict[str, float] | None) -> dict[str, float] | None:
        if scales is not None and not all(MIN_SCALE <= scale <= 1 / MIN_SCALE for scale in scales.values()):
            raise ValueError(f"scales must be between {MIN_SCALE} and {1 / MIN_SCALE:g}")
        return scales


@dataclass(frozen=True)
class Calibration:
    """The directions of each module.

    directions: module name in transformers -> float32 (in, width), orthonormal columns, the strongest direction first.
    """

    metadata: CalibrationMetadata
    directions: Mapping[str, F32]
    sha256: str  # sha256 of the file

    @property
    def width(self) -> int:
        """The largest supported rank. A module with fewer inputs than this has a full set of directions."""
        return max(int(directions.shape[1]) for directions in self.directions.values())

    def a(self, name: str, rank: int) -> F32:
        """Returns the frozen A of one module, float32 (in, rank).

        Raises InvalidRecipe if there are too few directions.
        """
        directions = self.directions.get(name)
        if directions is None:
            raise InvalidRecipe(f"the calibration has no directions for {name}; create one that covers this module")
        if directions.shape[1] < rank:
            raise InvalidRecipe(f"the calibration has {directions.shape[1]} directions for {name}; rank is {rank}")
        a: F32 = np.ascontiguousarray(directions[:, :rank]) / np.float32(np.sqrt(3))
        return a if self.metadata.scales is None else a * np.float32(self.metadata.scales[name])


def dump_calibration(metadata: CalibrationMetadata, directions: Mapping[str, F32]) -> bytes:
    """Returns a safetensors file with one float32 tensor per module. Equal contents give equal bytes."""
    tensors = {name: np.ascontiguousarray(directions[name], "<f4") for name in sorted(directions)}
    return safetensors.numpy.save(tensors, {_METADATA: canonical_json(metadata.model_dump(mode="json")).decode()})


def load_calibration(data: bytes) -> Calibration:
    """Parses and validates a calibration file.

    Raises InvalidUpload, naming the problem: file format, metadata, dtype, shape, non-finite values, or columns that
    are not orthonormal.
    """
    if len(data) > MAX_BYTES:
        raise InvalidUpload(f"the calibration has {len(data)} bytes; at most {MAX_BYTES} are allowed")
    try:
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # the package ships no types
    except safetensors.SafetensorError as error:
        raise InvalidUpload(f"the calibration is not a complete safetensors file ({error})") from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    try:
        metadata = CalibrationMetadata.model_validate_json((header.get("__metadata__") or {})[_METADATA])
    except (KeyError, TypeError, pydantic.ValidationError) as error:
        raise InvalidUpload(
            "the calibration has no description of its source; create it with `mobizo-server calibrate`"
        ) from error
    directions = {name: _directions(name, entry) for name, entry in tensors}
    if not directions:
        raise InvalidUpload("the calibration contains no directions")
    if metadata.scales is not None and metadata.scales.keys() != directions.keys():
        raise InvalidUpload("the calibration's scales name other modules than its directions")
    return Calibration(metadata, directions, sha256_hex(data))


def read_calibration(path: Path) -> Calibration:
    """Reads a calibration from a file. Raises InvalidUpload as `load_calibration`, or if the file cannot be read."""
    try:
        return load_calibration(path.read_bytes())
    except OSError as error:
        raise InvalidUpload(f"{path}: the calibration cannot be read ({error.strerror})") from error


def _directions(name: str, entry: Mapping[str, object]) -> F32:
    shape = entry["shape"]
    if entry["dtype"] != "F32" or not isinstance(shape, list) or len(shape) != 2 or not 0 < shape[1] <= shape[0]:
        raise InvalidUpload(f"calibration of {name}: {entry['dtype']} {shape}; it must be F32 [in, width], width <= in")
    directions: F32 = np.frombuffer(entry["data"], "<f4").astype(np.float32).reshape(shape)  # type: ignore[call-overload]
    if not np.isfinite(directions).all():
        raise InvalidUpload(f"calibration of {name}: it has values that are not finite")
    # Check for large values first, since their squares would overflow.
    large = np.abs(directions).max() > 2
    if large or np.abs(directions.T @ directions - np.eye(shape[1], dtype=np.float32)).max() > _ORTHONORMAL:
        raise InvalidUpload(f"calibration of {name}: its columns are not orthonormal")
    return directions
