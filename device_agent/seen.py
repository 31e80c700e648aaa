"""The highest version of each recipe's program that this device has seen, so that an old one cannot come back.

Knows no HTTP and no signature: what is noted here must have been verified before.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import RootModel, ValidationError

from device_agent.durable import write_durably
from shared.errors import Untrusted
from shared.program import ProgramManifest


class _Versions(RootModel[dict[str, int]]):
    """Version by recipe id."""


class SeenVersions:
    """A file of versions by recipe id; it only ever rises, until this device is enrolled again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def admit(self, manifest: ProgramManifest) -> None:
        """Notes a verified manifest's version. Raises Untrusted for a version below one seen before."""
        versions = self._read()
        highest = versions.get(manifest.recipe_id, 0)
        if manifest.version < highest:
            raise Untrusted(
                f"the program is version {manifest.version} of recipe {manifest.recipe_id[:12]}, but this device has "
                f"seen version {highest}: an old program was put in place of the new one; if the server was taken back "
                f"on purpose, enrol this device again"
            )
        if manifest.version > highest:
            document = _Versions(versions | {manifest.recipe_id: manifest.version})
            write_durably(self._path, document.model_dump_json(indent=1).encode())

    def _read(self) -> dict[str, int]:
        try:
            return _Versions.model_validate_json(self._path.read_bytes()).root
        except FileNotFoundError:
            return {}
        except ValidationError as error:
            # Taking it for empty would let every old program in.
            raise Untrusted(f"{self._path} cannot be read; enrol this device again") from error
