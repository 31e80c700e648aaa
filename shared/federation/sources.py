"""Sources of updates: the protocol that aggregation reads from, and an in-memory implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from shared.federation.update import F32, Contribution, Update


class UpdateSource(Protocol):
    """The updates of one round, in a fixed order."""

    @property
    def size(self) -> int:
        """D: elements of each update."""

    @property
    def contributions(self) -> Sequence[Contribution]:
        """The contribution of each update, in order, available without reading the updates."""

    def updates(self) -> Iterator[Update]:
        """Yields every update, validated. Its `flat` is valid until the next one is requested.

        Raises InvalidUpload, naming the member whose update is unusable.
        """

    def blocks(self, columns: int) -> Iterator[tuple[int, F32]]:
        """Yields all updates side by side, `columns` elements at a time: (offset, float32 (n, at most `columns`)).

        Call it after `updates`, which validates. The caller may change the array until it requests the next one.
        """


class MemorySource:
    """An `UpdateSource` of updates in memory, in the order of their members' names."""

    def __init__(self, updates: Sequence[Update]) -> None:
        """Raises ValueError unless there is at least one update, all have one size, and no member has two."""
        self._updates = sorted(updates, key=lambda update: update.member)
        check_members([update.member for update in self._updates])
        sizes = {update.flat.size for update in self._updates}
        if len(sizes) != 1:
            raise ValueError(f"updates of {sorted(sizes)} elements cannot be averaged")
        self._size = sizes.pop()

    @property
    def size(self) -> int:
        """D: elements of each update."""
        return self._size

    @property
    def contributions(self) -> Sequence[Contribution]:
        """The contribution of each update."""
        return [update.contribution for update in self._updates]

    def updates(self) -> Iterator[Update]:
        """Returns an iterator over the updates."""
        return iter(self._updates)

    def blocks(self, columns: int) -> Iterator[tuple[int, F32]]:
        """Yields all updates side by side."""
        for start in range(0, self._size, columns):
            yield start, np.stack([update.flat[start : start + columns] for update in self._updates])


def check_members(members: Sequence[str]) -> None:
    """Raises ValueError if there are no members or one appears twice."""
    if not members:
        raise ValueError("there are no updates to average")
    if len(set(members)) != len(members):
        duplicates = sorted({member for member in members if members.count(member) > 1})
        raise ValueError(f"{duplicates[0]} has more than one update in this round")
