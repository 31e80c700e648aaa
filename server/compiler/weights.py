"""The `.ptd` of a base model: its tensors, each stored once, readable by delegates and by portable kernels.

The file is made from the base alone, so it is byte-identical for every recipe of that base and precision. A tensor
that both kinds of reader share lies in one segment under two keys: its sha256 (what XNNPACK asks for: it names data by
content) and its name in the graph (what a portable kernel asks for). A tied lm_head is the embedding, stored once.
Knows nothing of recipes or graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
from executorch.exir.tensor_layout import TensorLayout
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
from torch import Tensor

ALIGNMENT = 16  # what kernels require of a tensor's address


@dataclass(frozen=True)
class Stored:
    """One tensor of a base: its bytes as stored, and the keys that ask for them."""

    data: bytes
    key: str  # of its content
    name: str | None  # of its buffer in a method's graph, where a portable kernel reads it
    tensor: Tensor  # whose shape and type a portable kernel sees


def write_weights(tensors: Iterable[Stored], path: Path) -> set[str]:
    """Writes a base's tensors to `path` and returns every key the file answers to."""
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
