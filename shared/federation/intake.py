"""One uploaded LoRA-B file becomes an update: read, hashed, checked and measured while it is in the processor's cache.

Knows neither where files lie, nor members, nor rounds.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import BinaryIO

import numpy as np

from shared.errors import InvalidUpload
from shared.federation.update import BLOCK, F32, sum_of_squares
from shared.lora import ADAPTER_TENSOR, HEADER_BYTES

READ = BLOCK  # elements read at once; as `euclidean_norm` takes them, so that both give one norm to the bit
_METADATA = "__metadata__"
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Rules:
    """What every file of a round must be."""

    size: int  # D
    a_sha256: str | None = None  # fingerprint of the frozen A that it must name; None: not asked
    norm_limit: float | None = None  # most that the update's Euclidean norm may be; None: any


def read_header(file: BinaryIO, rules: Rules) -> bytes:
    """The file's first bytes, up to its numbers, checked. Raises InvalidUpload naming what is wrong."""
    first = file.read(_LENGTH_BYTES)
    length = int.from_bytes(first, "little")
    if len(first) < _LENGTH_BYTES or length > HEADER_BYTES:
        raise InvalidUpload(f"the adapter says that its header has {length} bytes; at most {HEADER_BYTES} are taken")
    text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InvalidUpload("the adapter's header is no JSON; send it again") from error
    metadata = header.pop(_METADATA, {}) if isinstance(header, dict) else {}
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise InvalidUpload("the adapter's metadata is not text by name")
    expected = {ADAPTER_TENSOR: {"dtype": "F32", "shape": [rules.size], "data_offsets": [0, 4 * rules.size]}}
    # As text, since 1.0 and true are 1 to Python, and no size to a reader of safetensors.
    if json.dumps(header, sort_keys=True) != json.dumps(expected, sort_keys=True):
        raise InvalidUpload(f"the adapter must hold exactly one tensor, {ADAPTER_TENSOR!r}, of {rules.size} F32")
    if rules.a_sha256 is not None and (named := _fingerprint(metadata)) != rules.a_sha256:
        raise InvalidUpload(
            f"the adapter was trained with another A: its fingerprint is {named}, the cohort's {rules.a_sha256}"
        )
    return first + text


def read_update(file: BinaryIO, sha256: str, rules: Rules, start: F32, out: F32) -> float:
    """Fills `out` (D,) with the file's B minus `start` (D,), and returns its Euclidean norm.

    Raises InvalidUpload if the file is not whole, not the one that `sha256` names, not finite, or its update too large;
    `out` then holds nothing of use.
    """
    digest = hashlib.sha256(read_header(file, rules))
    squares = 0.0
    wide = np.empty(min(READ, rules.size), np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found by its norm
        for at in range(0, rules.size, READ):
            block = out[at : at + READ]
            data = block.data.cast("B")
            fill(file, data)
            digest.update(data)
            np.subtract(block.view("<f4"), start[at : at + READ], out=block)
            wide_block = wide[: block.size]
            np.copyto(wide_block, block)
            # Squares of float32 cannot overflow float64: the sum is finite if and only if every element is.
            squares += sum_of_squares(wide_block)
    if file.read(1):
        raise InvalidUpload("the adapter goes on after its numbers; send it again")
    if digest.hexdigest() != sha256:
        raise InvalidUpload(f"the adapter is not the file {sha256}; it is damaged, send it again")
    if not isfinite(squares):
        raise InvalidUpload(f"{ADAPTER_TENSOR} has values that are not finite; training diverged: lower lr")
    norm = sqrt(squares)
    if rules.norm_limit is not None and norm > rules.norm_limit:
        raise InvalidUpload(f"the update has a norm of {norm:.4g}; at most {rules.norm_limit:.4g} is taken here")
    return norm


def fill(file: BinaryIO, data: memoryview) -> None:
    """Reads as many bytes as `data` has. Raises InvalidUpload if the file ends before."""
    while data:
        count = file.readinto(data)  # type: ignore[attr-defined]  # every binary file of io has it
        if not count:
            raise InvalidUpload("the adapter breaks off; send it again")
        data = data[count:]


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise InvalidUpload("the adapter's header has a name twice, which readers would understand differently")
    return dict(pairs)


def _fingerprint(metadata: object) -> str | None:
    """The A fingerprint that a file's metadata names, if it does; what else it says is nobody's business here."""
    try:
        about = json.loads(metadata["mobizo"])  # type: ignore[index]  # whatever it is not is caught
        return str(about["a_sha256"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
