"""Key rotation statements, each signed by the outgoing signing key.

A device that pinned one key follows the chain of statements to the current signing key.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import Field

from shared.canonical import canonical_json
from shared.errors import Untrusted
from shared.signing import parse_public, public_text
from shared.strict_model import StrictModel


class KeyRotation(StrictModel):
    """Names the next signing key. Its fields differ from a manifest's, so that signatures cannot be swapped."""

    format: Literal[1] = 1
    kind: Literal["key-rotation"] = "key-rotation"
    previous_key: str = Field(max_length=100, description="Ed25519, base64: signs this")
    next_key: str = Field(max_length=100, description="Ed25519, base64: signs from now on")
    created_at: datetime


class SignedKeyRotation(StrictModel):
    """The statement and the signature of `previous_key` over its canonical JSON."""

    rotation: KeyRotation
    signature: str = Field(description="Ed25519, base64")


class ServerKeys(StrictModel):
    """The current signing key and the statements that lead to it, oldest first."""

    public_key: str = Field(description="Ed25519, base64: signs manifests")
    key_id: str
    rotations: list[SignedKeyRotation]


def sign_key_rotation(
    previous: Ed25519PrivateKey, next_key: Ed25519PublicKey, created_at: datetime
) -> SignedKeyRotation:
    """Returns the statement by `previous` that `next_key` signs from `created_at` on."""
    statement = KeyRotation(
        previous_key=public_text(previous.public_key()), next_key=public_text(next_key), created_at=created_at
    )
    return SignedKeyRotation(
        rotation=statement, signature=base64.b64encode(previous.sign(_signed_bytes(statement))).decode()
    )


def follow(pinned: str, server_keys: ServerKeys) -> list[str]:
    """Returns the keys (base64) after `pinned` up to `keys.public_key`; empty if that is `pinned` itself.

    Raises Untrusted if there is no unbroken chain of statements.
    """
    keys: list[str] = []
    current = pinned
    for signed in _statements_after(pinned, server_keys.rotations):
        statement = signed.rotation
        if statement.previous_key != current:
            raise _invalid_chain("a statement is missing")
        _verify(signed)
        current = statement.next_key
        if current in keys or current == pinned:
            raise _invalid_chain("it leads in a circle")
        keys.append(current)
    if current != server_keys.public_key:
        raise _invalid_chain("it does not lead to the key that signs now")
    return keys


def _statements_after(pinned: str, chain: Sequence[SignedKeyRotation]) -> Sequence[SignedKeyRotation]:
    start = next((n for n, signed in enumerate(chain) if signed.rotation.previous_key == pinned), len(chain))
    return chain[start:]


def _verify(signed: SignedKeyRotation) -> None:
    try:
        key = parse_public(signed.rotation.previous_key)
        key.verify(base64.b64decode(signed.signature, validate=True), _signed_bytes(signed.rotation))
        parse_public(signed.rotation.next_key)
    except (InvalidSignature, Untrusted, ValueError, binascii.Error) as error:
        raise _invalid_chain("a statement is not signed by the key that it follows") from error


def _invalid_chain(reason: str) -> Untrusted:
    return Untrusted(
        f"the server signs with a different key than at enrollment, and the chain of key rotations is invalid "
        f"({reason}); "
        f"if the server's key was changed on purpose, enroll this device again"
    )


def _signed_bytes(statement: KeyRotation) -> bytes:
    return canonical_json(statement.model_dump(mode="json"))
