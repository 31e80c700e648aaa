"""The `.ptd` of a base model: its tensors, each stored once, readable by delegates and by portable kernels.

The file is made from the base alone, so it is byte-identical for every recipe of that base and precision. Each
tensor lies in one segment under two keys: its sha256 (what XNNPACK asks for: it names data by content) and its
canonical name (what a portable kernel asks for). A tied lm_head is the embedding and is stored once.
Knows nothing of recipes or graphs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
from executorch.exir.tensor_layout import TensorLayout
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
from torch import Tensor

ALIGNMENT = 16  # what kernels require of a tensor's address


def content_key(tensor: Tensor) -> str:
    """The key that XNNPACK gives this tensor's data."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def write_weights(tensors: dict[str, Tensor], path: Path) -> set[str]:
    """Writes the base's tensors (float32, by canonical name) to `path` and returns every key the file answers to."""
    buffers: list[bytes] = []
    entries: dict[str, DataEntry] = {}
    for name in sorted(tensors):
        data = tensor_bytes(tensors[name])
        key = hashlib.sha256(data).hexdigest()
        known = entries.get(key)
        if known is None:
            known = DataEntry(buffer_index=len(buffers), alignment=ALIGNMENT, tensor_layout=None)
            buffers.append(data)
            entries[key] = known
        entries[name] = DataEntry(known.buffer_index, ALIGNMENT, TensorLayout.from_tensor(tensors[name]))
    payload = DataPayload(buffers=buffers, named_data=entries)
    with path.open("wb") as file:
        FlatTensorSerializer().serialize(payload).write_to_file(file)
    return set(entries)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The tensor's elements, row-major."""
    return bytes(tensor.contiguous().numpy().data)
