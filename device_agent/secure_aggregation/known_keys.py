"""Public keys of other devices, trusted on first use.

A device that enrolls again gets a new id, so the key of an id never changes. A server that substitutes a key is
therefore detected by every device that has met the id before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import RootModel

from device_agent.durable import read_document, write_document
from shared.errors import Untrusted


class _Keys(RootModel[dict[str, str]]):
    """Ed25519 public keys by device id, in hexadecimal."""


class KnownKeys:
    """The file of other devices' keys."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def trust(self, members: Mapping[str, bytes]) -> None:
        """Records devices' keys, all or none. Raises Untrusted if a different key was recorded before."""
        recorded_keys = self._read()
        presented = {member: identity.hex() for member, identity in members.items()}
        for member, key in presented.items():
            if recorded_keys.get(member, key) != key:
                raise Untrusted(
                    f"the server presents another key for device {member} than before, and could read messages to that "
                    "device; this device does not take part"
                )
        if presented.keys() - recorded_keys.keys():
            write_document(self._path, _Keys(recorded_keys | presented))

    def _read(self) -> dict[str, str]:
        # Treating a damaged file as empty would trust every key.
        damaged = Untrusted(f"{self._path} cannot be read; remove it to trust other devices anew")
        keys = read_document(self._path, _Keys, damaged)
        return {} if keys is None else keys.root
