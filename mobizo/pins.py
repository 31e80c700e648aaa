"""Which keys a server may sign with: the one it showed first, and those that took over from it. Knows no route."""

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
    """Keys (base64 Ed25519) by server address, kept at first contact. Later keys count only where theirs name them."""

    def __init__(self, path: Path | None = None) -> None:
        """path: a JSON file to keep them in; None: kept by this object. Raises BadRequest for a broken file."""
        self.path = path
        self._keys = {} if path is None else _read(path)

    @classmethod
    def of(cls, server: str, public_key: str) -> Pins:
        """Exactly this key (base64) of this server, told from elsewhere."""
        pins = cls()
        pins._keys[server.rstrip("/")] = [public_key]
        return pins

    def key(self, server: str, wanted: str, ask: Callable[[], ServerKeys]) -> Ed25519PublicKey:
        """The trusted key of a server whose id is `wanted`; the server is asked for its keys only if none has it yet.

        Raises Untrusted if there is none.
        """
        known = self._keys.get(server, [])
        if wanted not in _ids(known):
            known = self._learn(server, known, ask())
        found = _ids(known).get(wanted)
        if found is None:
            raise Untrusted(f"it is signed by key {wanted}, which {server} never named as its own")
        return found

    def _learn(self, server: str, known: list[str], keys: ServerKeys) -> list[str]:
        first = [signed.succession.previous_key for signed in keys.successions[:1]]
        start = known[-1:] or first or [keys.public_key]
        try:
            learnt = [*(known or start), *follow(start[0], keys)]
        except Untrusted as error:
            where = f"; if that was on purpose, take it out of {self.path}" if self.path else ""
            raise Untrusted(f"{server} signs with another key than the one pinned here{where}") from error
        if learnt != known:
            self._keys[server] = learnt
            self._write()
        return learnt

    def _write(self) -> None:
        """Whole or not at all, since another command may write, too."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
            file.write(json.dumps(_read(self.path) | self._keys, indent=2) + "\n")
        Path(file.name).replace(self.path)


def _ids(keys: list[str]) -> dict[str, Ed25519PublicKey]:
    parsed = [parse_public(text) for text in keys]
    return {key_id(key): key for key in parsed}


def _read(path: Path) -> dict[str, list[str]]:
    if not path.exists():
        return {}
    try:
        pins = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadRequest(f"{path} cannot be read ({error}); it holds the keys of servers met before") from error
    if not isinstance(pins, dict) or not all(
        isinstance(keys, list) and all(isinstance(key, str) for key in keys) for keys in pins.values()
    ):
        raise BadRequest(f"{path} is not a list of keys by server; it holds the keys of servers met before")
    return pins
