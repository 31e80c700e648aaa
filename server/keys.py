"""The server's signing key on disk. Knows no database and no HTTP."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shared.errors import Unavailable
from shared.signing import new_private_key, private_bytes


def create_key(path: Path) -> Ed25519PrivateKey:
    """A new key at `path`, readable by its owner only. Raises FileExistsError rather than replace one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = new_private_key()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(private_bytes(key))
        file.flush()
        os.fsync(file.fileno())
    return key


def load_key(path: Path) -> Ed25519PrivateKey:
    """The key at `path`. Raises Unavailable if it is missing, damaged, or readable by others."""
    try:
        mode = path.stat().st_mode
        raw = path.read_bytes()
    except OSError as error:
        raise Unavailable(f"the signing key {path} cannot be read; run `mobizo-server init` first") from error
    if mode & 0o077:
        raise Unavailable(f"the signing key {path} is open to other users; run `chmod 600 {path}`")
    try:
        return Ed25519PrivateKey.from_private_bytes(raw)
    except ValueError as error:
        raise Unavailable(f"the signing key {path} is damaged; restore it from a backup") from error
