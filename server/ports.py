"""A port: what a package needs from packages above it, without importing them.

The package that needs something declares a port, a package above it has an implementation, and `server.wiring` connects
the two when a process starts.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Implementation = TypeVar("Implementation")


class Port(Generic[Implementation]):
    """One port of this process. Reading a port that was never connected raises RuntimeError."""

    def __init__(self, name: str) -> None:
        """name: how error messages call the port."""
        self._name = name
        self._connected: list[Implementation] = []

    def connect(self, implementation: Implementation) -> None:
        """Connects the port; connecting an equal implementation again changes nothing.

        Raises RuntimeError for a different one.
        """
        if self._connected and self._connected[0] != implementation:
            raise RuntimeError(f"the port {self._name!r} is connected to something else already")
        self._connected = [implementation]

    def get(self) -> Implementation:
        """Returns the implementation."""
        if not self._connected:
            raise RuntimeError(f"the port {self._name!r} is not connected: call server.wiring.wire() first")
        return self._connected[0]
