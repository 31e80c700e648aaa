"""Turns one uploaded LoRA-B file into an update: reading, hashing, validation and norm in a single pass."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import BinaryIO

import numpy as np

from shared.errors import InvalidUpload
from shared.federation.update import BLOCK, F32, sum_of_squares
from shared.zo.lora import ADAPTER_TENSOR, HEADER_BYTES

READ_ELEMENTS = BLOCK  # elements read at once, as in `euclidean_norm`, so that both give the same norm bit for bit
_METADATA = "__metadata__"
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class UpdateRequirements:
    """The requirements on every file of a round."""

    size: int  # D
    a_sha256: str | None = None  # fingerprint of the frozen A that the file must name; None: any
    norm_limit: float | None = None  # largest Euclidean norm of the update; None: no limit


def read_header(file: BinaryIO, requirements: UpdateRequirements) -> bytes:
    """Reads and validates the file's header. Raises InvalidUpload with the reason."""
    length_bytes = file.read(_LENGTH_BYTES)
    length = int.from_bytes(length_bytes, "little")
    if len(length_bytes) < _LENGTH_BYTES or length > HEADER_BYTES:
        raise InvalidUpload(f"the adapter's header has {length} bytes; at most {HEADER_BYTES} are allowed")
    header_text = file.read(length)
    try:
        header = json.loads(header_text, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise InvalidUpload("the adapter's header is not valid JSON; send it again") from error
    metadata = header.pop(_METADATA, {}) if isinstance(header, dict) else {}
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise InvalidUpload("the adapter's metadata must map names to strings")
    expected = {
        ADAPTER_TENSOR: {"dtype": "F32", "shape": [requirements.size], "data_offsets": [0, 4 * requirements.size]}
    }
    # Compared as text, because Python treats 1.0 and true as equal to 1.
    if json.dumps(header, sort_keys=True) != json.dumps(expected, sort_keys=True):
        raise InvalidUpload(f"the adapter must hold exactly one tensor, {ADAPTER_TENSOR!r}, of {requirements.size} F32")
    if requirements.a_sha256 is not None and (fingerprint := _fingerprint(metadata)) != requirements.a_sha256:
        raise InvalidUpload(
            f"the adapter was trained with another A: its fingerprint is {fingerprint}, "
            f"the cohort's {requirements.a_sha256}"
        )
    return length_bytes + header_text


def read_update(file: BinaryIO, sha256: str, requirements: UpdateRequirements, start: F32, out: F32) -> float:
    """Fills `out` (D,) with the file's B minus `start` (D,) and returns its Euclidean norm.

    Raises InvalidUpload if the file is incomplete, does not match `sha256`, is not finite, or its update is too large.
    The contents of `out` are then undefined.
    """
    digest = hashlib.sha256(read_header(file, requirements))
    squares = 0.0
    wide = np.empty(min(READ_ELEMENTS, requirements.size), np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is detected by the norm
        for offset in range(0, requirements.size, READ_ELEMENTS):
            block = out[offset : offset + READ_ELEMENTS]
            data = block.data.cast("B")
            read_exactly(file, data)
            digest.update(data)
            np.subtract(block.view("<f4"), start[offset : offset + READ_ELEMENTS], out=block)
            wide_block = wide[: block.size]
            np.copyto(wide_block, block)
            # Squares of float32 cannot overflow float64: the sum is finite if and only if every element is.
            squares += sum_of_squares(wide_block)
    if file.read(1):
        raise InvalidUpload("the adapter has extra bytes after its tensor; send it again")
    if digest.hexdigest() != sha256:
        raise InvalidUpload(f"the adapter is not the file {sha256}; it is damaged, send it again")
    if not isfinite(squares):
        raise InvalidUpload(f"{ADAPTER_TENSOR} has values that are not finite; training diverged: lower lr")
    norm = sqrt(squares)
    if requirements.norm_limit is not None and norm > requirements.norm_limit:
        raise InvalidUpload(f"the update has a norm of {norm:.4g}; at most {requirements.norm_limit:.4g} is allowed")
    return norm


def read_exactly(file: BinaryIO, data: memoryview) -> None:
    """Reads exactly as many bytes as `data` has. Raises InvalidUpload if the file ends before."""
    while data:
        count = file.readinto(data)  # type: ignore[attr-defined]  # every binary file of io has it
        if not count:
            raise InvalidUpload("the adapter is truncated; send it again")
        data = data[count:]


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise InvalidUpload("the adapter's header has a duplicate name, which readers would interpret differently")
    return dict(pairs)


def _fingerprint(metadata: object) -> str | None:
    """Returns the fingerprint of A in a file's metadata, or None."""
    try:
        run_metadata = json.loads(metadata["mobizo"])  # type: ignore[index]  # other types are caught below
        return str(run_metadata["a_sha256"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
