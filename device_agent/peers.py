"""The keys by which this device knows others: trusted when first seen, and never to be another's after that.

A device that is enrolled again gets another id, so that an id's key never changes by itself: a server that puts a key
of its own in the place of a device's is found out by all that met the device before. Who meets it for the first time
must take the server's word. Knows no masking.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import RootModel, ValidationError

from device_agent.durable import write_durably
from shared.errors import Untrusted


class _Keys(RootModel[dict[str, str]]):
    """Ed25519 public keys by device id, in hexadecimal."""


class PeerBook:
    """Other devices' keys, in a file of this agent's home."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def trust(self, members: Mapping[str, bytes]) -> None:
        """Notes devices' keys, all or none. Raises Untrusted if another one was noted before."""
        known = self._read()
        shown = {member: identity.hex() for member, identity in members.items()}
        for member, key in shown.items():
            if known.get(member, key) != key:
                raise Untrusted(
                    f"the server shows device {member} with another key than before, and could read what is meant for "
                    "that device alone; this device takes no part"
                )
        if shown.keys() - known.keys():
            write_durably(self._path, _Keys(known | shown).model_dump_json(indent=1).encode())

    def _read(self) -> dict[str, str]:
        try:
            return _Keys.model_validate_json(self._path.read_bytes()).root
        except FileNotFoundError:
            return {}
        except ValidationError as error:
            # Taking it for empty would let every key in.
            raise Untrusted(f"{self._path} cannot be read; remove it to trust other devices anew") from error
