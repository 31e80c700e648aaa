"""A least-recently-used cache bounded by bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """Values by key, at most `limit` bytes in all."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.evicted = 0  # since creation
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def ordered_keys(self) -> list[Key]:
        """Returns the keys, least recently used first."""
        return list(self._values)

    def get(self, key: Key, nbytes: int, make: Callable[[], Value], in_use: Collection[Key]) -> Value:
        """Returns the value of `key`, created by `make` after evicting others to free `nbytes`.

        in_use: keys that must not be evicted. Raises MemoryError if the value does not fit beside them.
        """
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key][0]
        used_bytes = sum(size for other, (_, size) in self._values.items() if other in in_use)
        if used_bytes + nbytes > self.limit:
            raise MemoryError(f"{nbytes} bytes do not fit {self.limit} beside {used_bytes} in use")
        for other in [other for other in self._values if other not in in_use]:
            if self.nbytes + nbytes <= self.limit:
                break
            self.nbytes -= self._values.pop(other)[1]
            self.evicted += 1
        value = make()
        self._values[key] = (value, nbytes)
        self.nbytes += nbytes
        return value
