"""The keys of other devices, as this one first saw them in masked rounds: a server that swaps one later is found out.

Trust on first use: whom a server shows from the first moment with a false key is not found out by this. Knows no
masking and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from device_agent.durable import write_durably
from shared.errors import Untrusted


class KnownPeers(BaseModel):
    """What the file holds: hexadecimal Ed25519 public keys by device id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: dict[str, str] = Field(default_factory=dict)


class Peers:
    """The file that keeps them; called with a roster's identities, it pins the new ones."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, identities: Mapping[str, bytes]) -> None:
        """Raises Untrusted if a device has another key (32 bytes) than it was first seen with."""
        known = self._known().keys
        shown = {member: key.hex() for member, key in identities.items()}
        for member, key in shown.items():
            if known.get(member, key) != key:
                raise Untrusted(
                    f"device {member} has another key in this round than before; if it was enrolled again, remove "
                    f"{self._path} and all devices are met anew"
                )
        if not shown.items() <= known.items():
            write_durably(self._path, KnownPeers(keys=known | shown).model_dump_json(indent=1).encode())

    def _known(self) -> KnownPeers:
        try:
            return KnownPeers.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return KnownPeers()
        except ValidationError as error:
            raise Untrusted(f"{self._path} is damaged, so that no device can be known again; remove it") from error
