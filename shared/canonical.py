"""Canonical JSON (RFC 8785) and sha256, which identify all content-addressed data."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import rfc8785

CHUNK_BYTES = 1 << 20


def canonical_json(value: Any) -> bytes:
    """Returns `value` (JSON types only; integers within +-(2^53 - 1)) as RFC 8785 bytes."""
    return rfc8785.dumps(value)


def sha256_hex(data: bytes) -> str:
    """Returns the sha256 of `data` as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """Returns the sha256 of a file as 64 lower-case hexadecimal digits. Reads 1 MiB at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
