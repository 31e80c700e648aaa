"""The header of a GGUF file: its metadata, and where its tensors are. torch is not imported.

The `gguf` package's own reader creates an array for every string, which takes seconds for a vocabulary; this takes a
tenth of a second. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, dequantize
from gguf.quants import quant_shape_to_byte_shape
from numpy.typing import NDArray

from shared.errors import UnreadableCheckpoint

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"  # of the tensors' data; 32 bytes in a file that does not name it
_NUMBERS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file. shape: rows first. offset: of its data, in bytes from the beginning of the file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int

    @property
    def elements(self) -> int:
        """The number of its values."""
        return prod(self.shape)

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape of its data in bytes. Raises ValueError if its rows are not whole blocks."""
        byte_shape: tuple[int, ...] = quant_shape_to_byte_shape(self.shape, self.type)
        return byte_shape

    def values(self) -> NDArray[np.float32]:
        """Reads its values. Raises NotImplementedError or ValueError for a type that `gguf` cannot dequantize."""
        shape = self.byte_shape
        # Read, not mapped: a mapping would keep the pages of all tensors in memory.
        data = np.fromfile(self.path, np.uint8, prod(shape), offset=self.offset)
        values: NDArray[np.float32] = dequantize(data.reshape(shape), self.type).astype(np.float32, copy=False)
        return values


@lru_cache
def can_dequantize(kind: GGMLQuantizationType) -> bool:
    """Whether `gguf` can dequantize a type, tried on one block of zeros."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@dataclass(frozen=True)
class GgufFile:
    """The header of a file."""

    metadata: Mapping[str, Any]  # numbers, booleans, strings, and lists of one of these
    tensors: tuple[GgufTensor, ...]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Reads the header of the file at `path`. Raises UnreadableCheckpoint if header or data are not complete."""
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(data).file(path)
        except (ValueError, IndexError, OSError, struct.error) as error:
            raise UnreadableCheckpoint(
                f"{path.name} is not a complete GGUF file ({error}); copy or download it again"
            ) from error


class _Header:
    """Reads a header from its beginning."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def file(self, path: Path) -> GgufFile:
        """Returns the header."""
        if self._bytes(4) != MAGIC:
            raise ValueError("it does not start with GGUF")
        version, tensors, fields = self._numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}; versions {' and '.join(map(str, VERSIONS))} are supported")
        metadata: dict[str, Any] = {}
        for _ in range(fields):
            name = self._string()
            if name in metadata:
                raise ValueError(f"it has two values of {name}")
            metadata[name] = self._value(*self._numbers("I"))
        descriptions = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get(ALIGNMENT, 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"its alignment {alignment} is not a power of two")
        start = -(-self._at // alignment) * alignment
        file_tensors = [
            GgufTensor(path, name, shape, kind, start + offset) for name, shape, kind, offset in descriptions
        ]
        if len({tensor.name for tensor in file_tensors}) != len(file_tensors):
            raise ValueError("two tensors have one name")
        for tensor in file_tensors:
            if tensor.offset + prod(tensor.byte_shape) > len(self._data):
                raise ValueError(f"tensor {tensor.name} is truncated")
        return GgufFile(metadata, tuple(file_tensors))

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        (count,) = self._numbers("I")
        shape = self._numbers(f"{count}Q")
        kind, offset = self._numbers("IQ")
        return name, shape[::-1], GGMLQuantizationType(kind), offset

    def _value(self, number: int) -> Any:
        kind = GGUFValueType(number)
        if kind is GGUFValueType.STRING:
            return self._string()
        if kind is not GGUFValueType.ARRAY:
            return self._numbers(_NUMBERS[kind])[0]
        number, count = self._numbers("IQ")
        kind = GGUFValueType(number)
        if kind is GGUFValueType.STRING:
            return [self._string() for _ in range(count)]
        if kind is GGUFValueType.ARRAY:
            raise ValueError("it has an array of arrays")
        return list(self._numbers(f"{count}{_NUMBERS[kind]}"))

    def _string(self) -> str:
        (size,) = self._numbers("Q")
        return self._bytes(size).decode(errors="replace")  # a vocabulary may have tokens that are no text

    def _numbers(self, format_: str) -> tuple[Any, ...]:
        numbers = struct.unpack_from(f"<{format_}", self._data, self._at)
        self._at += struct.calcsize(f"<{format_}")
        return numbers

    def _bytes(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise ValueError("it is truncated")
        self._at += size
        return self._data[self._at - size : self._at]
