"""The manifest of a backup, `backup.json`."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DIGEST = r"^[0-9a-f]{64}$"
MANIFEST, OBJECTS, KEYS = "backup.json", "objects", "keys"


class BackedUpFile(BaseModel):
    """A file of the artifact store, under `objects/SHA256`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=DIGEST)
    size: int = Field(ge=0)


class BackupManifest(BaseModel):
    """The parts of a backup. database: name of the copy of the SQLite database, or of the dump by pg_dump."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    made_at: datetime
    version: str
    revision: str
    database: Literal["mobizo.sqlite3", "mobizo.pgdump"]
    database_sha256: str = Field(pattern=DIGEST)
    files: tuple[BackedUpFile, ...]
    keys: tuple[str, ...] = Field(description="paths under `keys`; empty: the backup does not include the signing keys")

    @property
    def size(self) -> int:
        """Total size of all stored files, bytes."""
        return sum(file.size for file in self.files)
