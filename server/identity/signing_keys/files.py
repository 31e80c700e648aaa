"""The server's signing keys on disk.

keys/manifest.ed25519        the key that signs
keys/next.ed25519            the next key, while `keys rotate` runs
keys/former/KEY_ID.ed25519   former keys, until `keys retire` destroys them
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shared.errors import Unavailable
from shared.signing import key_id, new_private_key, private_bytes


def create_key(path: Path) -> Ed25519PrivateKey:
    """Creates a key at `path`, readable by its owner only. Raises FileExistsError if there is one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = new_private_key()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(private_bytes(key))
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)
    return key


def load_key(path: Path) -> Ed25519PrivateKey:
    """Returns the key at `path`. Raises Unavailable if it is missing, damaged, or readable by others."""
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


@dataclass(frozen=True)
class KeyFiles:
    """The keys of one home. path: of the key that signs."""

    path: Path

    @property
    def following(self) -> Path:
        """Path of the next key."""
        return self.path.with_name("next.ed25519")

    @property
    def former(self) -> Path:
        """Directory of the former keys."""
        return self.path.with_name("former")

    def load(self) -> Ed25519PrivateKey:
        """Returns the key that signs. Raises Unavailable."""
        return load_key(self.path)

    def prepare(self) -> Ed25519PrivateKey:
        """Creates the next key, replacing one that an interrupted rotation left."""
        self.following.unlink(missing_ok=True)
        return create_key(self.following)

    def settle(self, current: str) -> None:
        """Moves the next key into place if it has the id `current`, and the previous key to the former ones.

        This also finishes a rotation that was killed after its commit. Calling it again changes nothing.
        """
        try:
            if key_id(load_key(self.following).public_key()) != current:
                return
        except Unavailable:
            return
        before = key_id(self.load().public_key())
        if before != current:
            self.former.mkdir(mode=0o700, exist_ok=True)
            # Another process on this host may do the same at this moment.
            with suppress(FileExistsError):
                os.link(self.path, self.former / f"{before}.ed25519")
            _sync(self.former)
        with suppress(FileNotFoundError):
            self.following.replace(self.path)
        _sync(self.path.parent)

    def kept(self) -> list[str]:
        """Returns the ids of the former keys whose private halves are on this host."""
        return sorted(path.stem for path in self.former.glob("*.ed25519")) if self.former.is_dir() else []

    def destroy(self, former: str) -> None:
        """Removes the private half of a former key."""
        (self.former / f"{former}.ed25519").unlink(missing_ok=True)
        if self.former.is_dir():
            _sync(self.former)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
