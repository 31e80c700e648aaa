"""Canonical JSON (RFC 8785) and sha256: the identity of everything that is content-addressed.

Knows no mobizo types.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import rfc8785

CHUNK_BYTES = 1 << 20


def canonical_json(value: Any) -> bytes:
    """`value` (JSON types only; integers within +-(2^53 - 1)) as RFC 8785 bytes."""
    return rfc8785.dumps(value)


def sha256_hex(data: bytes) -> str:
    """Lower-case hexadecimal sha256 of `data`, 64 characters."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """Lower-case hexadecimal sha256 of a file, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
