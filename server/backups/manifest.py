"""What a backup says of itself, in `backup.json`. Knows no files."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DIGEST = r"^[0-9a-f]{64}$"
MANIFEST, OBJECTS, KEYS = "backup.json", "objects", "keys"


class BackedUpFile(BaseModel):
    """A file of the store, under `objects/SHA256`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=DIGEST)
    size: int = Field(ge=0)


class BackupManifest(BaseModel):
    """The list of a backup's parts; database: the file's name in it, a copy of SQLite's or pg_dump's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    made_at: datetime
    version: str
    revision: str
    database: Literal["mobizo.sqlite3", "mobizo.pgdump"]
    database_sha256: str = Field(pattern=DIGEST)
    files: tuple[BackedUpFile, ...]
    keys: tuple[str, ...] = Field(description="paths under `keys`; empty: they are kept elsewhere")

    @property
    def size(self) -> int:
        """Bytes of all stored files."""
        return sum(file.size for file in self.files)
