"""Tensors of a checkpoint that stay in its files until they are used, so that a base model need not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LazyTensor:
    """One tensor of a checkpoint. read: reads it from its file, float32, in the layout of the decoder."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class LazyTensors(Mapping[str, "Tensor"]):
    """Tensors by name. Each access reads the tensor from its file again."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
