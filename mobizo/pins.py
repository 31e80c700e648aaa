"""Which key a server may sign with: the one it showed first, or the one that took over from it. Knows no route."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shared.errors import BadRequest, Untrusted
from shared.signing import key_id, parse_public
from shared.succession import ServerKeys, follow


def default_path() -> Path:
    """The file that `mobizo` keeps pins in: servers.json in XDG_CONFIG_HOME/mobizo or ~/.config/mobizo."""
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "mobizo" / "servers.json"


class Pins:
    """A key (base64 Ed25519) for each server address, kept at first contact; another counts where that one names it."""

    def __init__(self, path: Path | None = None) -> None:
        """path: a JSON file to keep them in; None: kept by this object. Raises BadRequest for a broken file."""
        self.path = path
        self._keys = {} if path is None else _read(path)

    @classmethod
    def of(cls, server: str, public_key: str) -> Pins:
        """This key (base64) of this server, told from elsewhere."""
        pins = cls()
        pins._keys[server.rstrip("/")] = public_key
        return pins

    def key(self, server: str, wanted: str, ask: Callable[[], ServerKeys]) -> Ed25519PublicKey:
        """The trusted key of a server, whose id must be `wanted`; the server is asked who signs only if it is not yet.

        Raises Untrusted.
        """
        pinned = self._keys.get(server)
        if pinned is None or key_id(parse_public(pinned)) != wanted:
            pinned = self._follow(server, pinned, ask())
        key = parse_public(pinned)
        if key_id(key) != wanted:
            raise Untrusted(f"it is signed with key {wanted}, and {server} signs with {key_id(key)}")
        return key

    def _follow(self, server: str, pinned: str | None, keys: ServerKeys) -> str:
        try:
            path = [keys.public_key] if pinned is None else follow(pinned, keys)
        except Untrusted as error:
            where = f"; if that was on purpose, take it out of {self.path}" if self.path else ""
            raise Untrusted(f"{server} signs with another key than the one that was pinned{where}") from error
        for key in path[-1:]:
            self._keys[server] = key
            self._write(server, key)
        return self._keys[server]

    def _write(self, server: str, key: str) -> None:
        """Whole or not at all; another command may have written meanwhile."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
            file.write(json.dumps(_read(self.path) | {server: key}, indent=2) + "\n")
        Path(file.name).replace(self.path)


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        pins = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadRequest(f"{path} cannot be read ({error}); it holds the keys of servers met before") from error
    if not isinstance(pins, dict) or not all(isinstance(key, str) for key in pins.values()):
        raise BadRequest(f"{path} is not a list of keys by server; it holds the keys of servers met before")
    return pins
