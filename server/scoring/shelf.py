"""Things kept in a bounded number of bytes; of too many, the one used longest ago goes. Knows not what they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Thing = TypeVar("Thing")


class Shelf(Generic[Key, Thing]):
    """Things by key, at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.evicted = 0  # since the beginning
        self._things: OrderedDict[Key, tuple[Thing, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._things)

    def held(self) -> list[Key]:
        """Keys of what is there, the one used longest ago first."""
        return list(self._things)

    def get(self, key: Key, nbytes: int, make: Callable[[], Thing], in_use: Collection[Key]) -> Thing:
        """The thing of that key, made if it is not there, once there is room for its `nbytes`.

        in_use: keys of things that must stay. Raises MemoryError if there is no room beside them.
        """
        if key in self._things:
            self._things.move_to_end(key)
            return self._things[key][0]
        held = sum(size for other, (_, size) in self._things.items() if other in in_use)
        if held + nbytes > self.limit:
            raise MemoryError(f"{nbytes} bytes do not fit {self.limit} beside {held} in use")
        for other in [other for other in self._things if other not in in_use]:
            if self.nbytes + nbytes <= self.limit:
                break
            self.nbytes -= self._things.pop(other)[1]
            self.evicted += 1
        thing = make()
        self._things[key] = (thing, nbytes)
        self.nbytes += nbytes
        return thing
