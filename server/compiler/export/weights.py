"""Writes the `.ptd` of a base model: its tensors, each stored once, for delegates and portable kernels.

The file depends on the base only, so it is byte-identical for every recipe of that base and precision. A tensor that
both kinds of readers use is one segment with two keys: its sha256 for XNNPACK, which names data by content, and its
name in the graph for portable kernels. A tied lm_head is stored once, as the embedding.

The file's order follows the keys, which are known only when every tensor was hashed. Until then tensors wait in files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
from executorch.exir.tensor_layout import TensorLayout
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
from torch import Tensor

from server.compiler.model.quantization import key_of, stored_bytes, stored_key
from server.compiler.model.rounding import Scheme

ALIGNMENT = 16  # alignment of tensors in memory that kernels require


@dataclass(frozen=True)
class Stored:
    """One tensor of a base: its stored bytes and their keys."""

    data: bytes | FileBackedData
    key: str  # key derived from the content
    name: str | None  # name of its buffer in a method's graph, if a portable kernel reads it
    tensor: Tensor  # its values for graphs

    @classmethod
    def of(cls, buffer: str, tensor: Tensor, scheme: Scheme | None, name: str | None, directory: Path | None) -> Stored:
        """Returns the tensor as it is stored in `scheme`. buffer: its name in a layer or in the backbone.

        directory: where bytes and values are written, as files named by their keys; the tensor is then mapped from its
        file and takes memory only where it is read. None: all stay in memory.
        """
        data = stored_bytes(buffer, tensor, scheme)
        key = key_of(buffer, data)
        if directory is None:
            return cls(data, key, name, tensor)
        stored = _written(directory / key, data)
        values = stored if len(data) == tensor.nbytes else _written(directory / f"{key}.values", _bytes(tensor))
        return cls(FileBackedData(str(stored)), key, name, _mapped(values, tensor))


class StoredKeys(Set[str]):
    """The keys of a weights file: by content, and names of buffers in graphs."""

    def __init__(self, tensors: Iterable[Stored] = ()) -> None:
        self._keys: set[str] = set()
        self._keys_by_place: dict[tuple[int, int], str] = {}
        for stored in tensors:
            self._keys |= {stored.key} if stored.name is None else {stored.key, stored.name}
            self._keys_by_place[_place(stored.tensor)] = stored.key

    def key(self, buffer: str, tensor: Tensor, scheme: Scheme | None) -> str:
        """Returns the tensor's key by content. Tensors of the base are not read; see `stored_key`."""
        return self._keys_by_place.get(_place(tensor)) or stored_key(buffer, tensor, scheme)

    @classmethod
    def _from_iterable(cls, it: Iterable[str]) -> Set[str]:  # type: ignore[override]
        """Makes the result of `|` and `&`, as `collections.abc.Set` asks of a class with another constructor."""
        return frozenset(it)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def write_weights(tensors: Iterable[Stored], path: Path) -> StoredKeys:
    """Writes a base's tensors to `path` and returns all keys of the file."""
    ordered = sorted(tensors, key=lambda stored: (stored.name or "", stored.key))
    buffers: list[bytes | FileBackedData] = []
    entries: dict[str, DataEntry] = {}
    for stored in ordered:
        entry = entries.get(stored.key)
        if entry is None:
            entry = DataEntry(buffer_index=len(buffers), alignment=ALIGNMENT, tensor_layout=None)
            buffers.append(stored.data)
            entries[stored.key] = entry
        if stored.name is not None:
            layout = TensorLayout.from_tensor(stored.tensor)
            entries[stored.name] = DataEntry(entry.buffer_index, ALIGNMENT, layout)
    payload = DataPayload(buffers=buffers, named_data=entries)
    with path.open("wb") as file:
        FlatTensorSerializer().serialize(payload).write_to_file(file)
    return StoredKeys(ordered)


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().numpy().data
    return data


def _written(path: Path, data: bytes | memoryview) -> Path:
    if not path.exists():  # equal tensors are stored once
        path.write_bytes(data)
    return path


def _mapped(path: Path, like: Tensor) -> Tensor:
    return torch.from_file(str(path), shared=False, size=like.numel(), dtype=like.dtype).reshape(like.shape)


def _place(tensor: Tensor) -> tuple[int, int]:
    """Returns a tensor's address and size, which identify it while the base is in use."""
    return tensor.data_ptr(), tensor.nbytes
