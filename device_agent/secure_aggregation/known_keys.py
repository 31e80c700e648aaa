"""Public keys of other devices, trusted on first use.

A device that enrolls again gets a new id, so the key of an id never changes. A server that substitutes a key is
therefore detected by every device that has met the id before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import RootModel, ValidationError

from device_agent.durable import write_durably
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
            write_durably(self._path, _Keys(recorded_keys | presented).model_dump_json(indent=1).encode())

    def _read(self) -> dict[str, str]:
        try:
            return _Keys.model_validate_json(self._path.read_bytes()).root
        except FileNotFoundError:
            return {}
        except ValidationError as error:
            # Treating it as empty would trust every key.
            raise Untrusted(f"{self._path} cannot be read; remove it to trust other devices anew") from error
