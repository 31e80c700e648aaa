"""Writes the `.ptd` of a base model: its tensors, each stored once, for delegates and portable kernels.

The file depends on the base only, so it is byte-identical for every recipe of that base and precision. A tensor that
both kinds of readers use is one segment with two keys: its sha256 for XNNPACK, which names data by content, and its
name in the graph for portable kernels. A tied lm_head is stored once, as the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
from executorch.exir.tensor_layout import TensorLayout
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
from torch import Tensor

ALIGNMENT = 16  # alignment of tensors in memory that kernels require


@dataclass(frozen=True)
class Stored:
    """One tensor of a base: its stored bytes and their keys."""

    data: bytes
    key: str  # key derived from the content
    name: str | None  # name of its buffer in a method's graph, if a portable kernel reads it
    tensor: Tensor  # its shape and type for portable kernels


def write_weights(tensors: Iterable[Stored], path: Path) -> set[str]:
    """Writes a base's tensors to `path` and returns all keys of the file."""
    buffers: list[bytes] = []
    entries: dict[str, DataEntry] = {}
    for stored in sorted(tensors, key=lambda stored: (stored.name or "", stored.key)):
        known = entries.get(stored.key)
        if known is None:
            known = DataEntry(buffer_index=len(buffers), alignment=ALIGNMENT, tensor_layout=None)
            buffers.append(stored.data)
            entries[stored.key] = known
        if stored.name is not None:
            layout = TensorLayout.from_tensor(stored.tensor)
            entries[stored.name] = DataEntry(known.buffer_index, ALIGNMENT, layout)
    payload = DataPayload(buffers=buffers, named_data=entries)
    with path.open("wb") as file:
        FlatTensorSerializer().serialize(payload).write_to_file(file)
    return set(entries)
