"""Key pinning: the client keeps the signing key that a server showed first, and follows its signed key rotations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from mobizo.profiles import config_directory
from shared.durable import write_durably
from shared.errors import BadRequest, Untrusted
from shared.key_rotation import ServerKeys, follow
from shared.signing import key_id, parse_public


def default_path() -> Path:
    """Returns the file in which the `mobizo` command keeps keys: `servers.json` in the directory of its files."""
    return config_directory() / "servers.json"


class PinnedKeys:
    """One trusted Ed25519 key (base64) per server URL.

    The first key that a server shows is trusted. A later key is trusted if the pinned key signed the rotation to it.
    """

    def __init__(self, path: Path | None = None) -> None:
        """path: JSON file that stores the keys; None: keys are kept in memory only.

        Raises BadRequest if the file cannot be read.
        """
        self.path = path
        self._keys = {} if path is None else _read(path)

    @classmethod
    def of(cls, base_url: str, public_key: str) -> PinnedKeys:
        """Returns pinned keys, kept in memory, with this key (base64) for this server."""
        pinned = cls()
        pinned._keys[base_url.rstrip("/")] = public_key
        return pinned

    def key(self, base_url: str, wanted_id: str, fetch_keys: Callable[[], ServerKeys]) -> Ed25519PublicKey:
        """Returns the trusted key of a server, whose id must be `wanted_id`.

        fetch_keys: asks the server for its keys; called only if the pinned key does not have the wanted id.
        Raises Untrusted if the server's key is not trusted, or has another id.
        """
        pinned = self._keys.get(base_url)
        if pinned is None or key_id(parse_public(pinned)) != wanted_id:
            pinned = self._update(base_url, pinned, fetch_keys())
        key = parse_public(pinned)
        if key_id(key) != wanted_id:
            raise Untrusted(f"the signature is by key {wanted_id}, but {base_url} signs with key {key_id(key)}")
        return key

    def _update(self, base_url: str, pinned: str | None, keys: ServerKeys) -> str:
        """Pins the server's current key if it may be trusted, and returns the pinned key."""
        try:
            new_keys = [keys.public_key] if pinned is None else follow(pinned, keys)
        except Untrusted as error:
            remedy = f"; if the key was replaced on purpose, remove the server from {self.path}" if self.path else ""
            raise Untrusted(f"{base_url} signs with another key than the pinned one{remedy}") from error
        if new_keys:
            self._keys[base_url] = new_keys[-1]
            self._write(base_url, new_keys[-1])
        return self._keys[base_url]

    def _write(self, base_url: str, key: str) -> None:
        """Replaces the file atomically; reads it again first, because another process may have added a key."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self.path, (json.dumps(_read(self.path) | {base_url: key}, indent=2) + "\n").encode())


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        keys = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadRequest(f"{path}, which holds the pinned keys of servers, cannot be read ({error})") from error
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys.values()):
        raise BadRequest(f"{path} must be a JSON object with one pinned key per server URL")
    return keys
