"""Where updates come from: the port that aggregation reads, and the source in memory.

Knows neither files nor what is done with the updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from shared.federation.update import F32, Contribution, Update


class UpdateSource(Protocol):
    """The updates of one round, in an order that is the same whenever they are read."""

    @property
    def size(self) -> int:
        """D: elements of each update."""

    @property
    def contributions(self) -> Sequence[Contribution]:
        """What is known of each update without reading it, in order."""

    def updates(self) -> Iterator[Update]:
        """Every update, each checked. Its `flat` is good until the next is asked for.

        Raises InvalidUpload naming the member whose update cannot be used.
        """

    def blocks(self, columns: int) -> Iterator[tuple[int, F32]]:
        """All updates side by side, `columns` elements at a time: (offset, float32 (n, at most `columns`)).

        To be asked for after `updates`, which checks them. The array is the caller's until the next is asked for.
        """


class MemorySource:
    """Updates that are in memory, in the order of their members' names."""

    def __init__(self, updates: Sequence[Update]) -> None:
        """Raises ValueError unless there is at least one, all are of one size, and no member has two."""
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
        """What each update is but for its numbers."""
        return [update.contribution for update in self._updates]

    def updates(self) -> Iterator[Update]:
        """Every update."""
        return iter(self._updates)

    def blocks(self, columns: int) -> Iterator[tuple[int, F32]]:
        """All updates side by side."""
        for at in range(0, self._size, columns):
            yield at, np.stack([update.flat[at : at + columns] for update in self._updates])


def check_members(members: Sequence[str]) -> None:
    """Raises ValueError if there are none, or if one of them is there twice."""
    if not members:
        raise ValueError("there are no updates to average")
    if len(set(members)) != len(members):
        twice = sorted({member for member in members if members.count(member) > 1})
        raise ValueError(f"{twice[0]} has more than one update in this round")
