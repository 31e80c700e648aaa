"""How a server's signing key hands over to the next: statements, each signed by the key that goes.

A device that pinned one key follows the statements link by link to the key that signs now. Knows nothing of where keys
are kept or asked for.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field

from shared.canonical import canonical_json
from shared.errors import Untrusted
from shared.signing import parse_public, public_text


class Succession(BaseModel):
    """One key names the next. Its fields are no manifest's, so that no signature over one passes for the other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    kind: Literal["key-succession"] = "key-succession"
    previous_key: str = Field(max_length=100, description="Ed25519, base64: signs this")
    next_key: str = Field(max_length=100, description="Ed25519, base64: signs from now on")
    made_at: datetime


class SignedSuccession(BaseModel):
    """The statement and the signature of `previous_key` over its canonical JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    succession: Succession
    signature: str = Field(description="Ed25519, base64")


class ServerKeys(BaseModel):
    """The key that signs now, and the statements that lead to it, the oldest first."""

    model_config = ConfigDict(extra="forbid")

    public_key: str = Field(description="Ed25519, base64: signs manifests")
    key_id: str
    successions: list[SignedSuccession]


def sign_succession(previous: Ed25519PrivateKey, following: Ed25519PublicKey, made_at: datetime) -> SignedSuccession:
    """The statement of `previous` that `following` signs from `made_at` on."""
    statement = Succession(
        previous_key=public_text(previous.public_key()), next_key=public_text(following), made_at=made_at
    )
    return SignedSuccession(
        succession=statement, signature=base64.b64encode(previous.sign(_content(statement))).decode()
    )


def follow(pinned: str, keys: ServerKeys) -> list[str]:
    """The keys (base64) after `pinned`, the last of which is `keys.public_key`; empty if that is `pinned` itself.

    Raises Untrusted if no unbroken chain of statements leads there.
    """
    path: list[str] = []
    at = pinned
    for signed in _from(pinned, keys.successions):
        statement = signed.succession
        if statement.previous_key != at:
            raise _broken("a statement is missing")
        _verify(signed)
        at = statement.next_key
        if at in path or at == pinned:
            raise _broken("it leads in a circle")
        path.append(at)
    if at != keys.public_key:
        raise _broken("it does not lead to the key that signs now")
    return path


def _from(pinned: str, chain: Sequence[SignedSuccession]) -> Sequence[SignedSuccession]:
    start = next((n for n, signed in enumerate(chain) if signed.succession.previous_key == pinned), len(chain))
    return chain[start:]


def _verify(signed: SignedSuccession) -> None:
    try:
        key = parse_public(signed.succession.previous_key)
        key.verify(base64.b64decode(signed.signature, validate=True), _content(signed.succession))
        parse_public(signed.succession.next_key)
    except (InvalidSignature, Untrusted, ValueError, binascii.Error) as error:
        raise _broken("a statement is not signed by the key that it follows") from error


def _broken(why: str) -> Untrusted:
    return Untrusted(
        f"the server signs with another key than this device was enrolled with, and the chain of its keys does not "
        f"hold ({why}); if the server's key was changed on purpose, enrol this device again"
    )


def _content(statement: Succession) -> bytes:
    return canonical_json(statement.model_dump(mode="json"))
