"""Ed25519 signatures over the manifests of programs and adapters."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shared.canonical import sha256_hex
from shared.errors import Untrusted
from shared.program import ProgramManifest, SignedManifest
from shared.registry import AdapterManifest, SignedAdapter


def new_private_key() -> Ed25519PrivateKey:
    """Generates a signing key."""
    return Ed25519PrivateKey.generate()


def private_bytes(key: Ed25519PrivateKey) -> bytes:
    """Returns the 32 raw bytes of a private key."""
    return key.private_bytes(serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption())


def public_text(key: Ed25519PublicKey) -> str:
    """Returns a public key as base64 of its 32 raw bytes."""
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return base64.b64encode(raw).decode()


@lru_cache(maxsize=4096)  # a server verifies many requests of one device
def parse_public(text: str) -> Ed25519PublicKey:
    """Parses a public key written by `public_text`. Raises Untrusted if it is not valid."""
    try:
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True))
    except (ValueError, binascii.Error) as error:
        raise Untrusted("the server's public key is not base64 of 32 bytes; enroll this device again") from error


def key_id(key: Ed25519PublicKey) -> str:
    """Returns the id of a public key: the first 16 hexadecimal digits of its sha256."""
    return sha256_hex(public_text(key).encode())[:16]


def choose_key(wanted_id: str, keys: Sequence[Ed25519PublicKey]) -> Ed25519PublicKey:
    """Returns the key with this id, or the first key if there is none, with which verification then fails."""
    return next((key for key in keys if key_id(key) == wanted_id), keys[0])


def sign_manifest(manifest: ProgramManifest, key: Ed25519PrivateKey) -> SignedManifest:
    """Returns the manifest with the server's signature."""
    return SignedManifest(
        manifest=manifest, key_id=key_id(key.public_key()), signature=_sign(manifest.canonical(), key)
    )


def verify_manifest(signed: SignedManifest, key: Ed25519PublicKey) -> ProgramManifest:
    """Returns the manifest if its signature and its recipe id are valid. Raises Untrusted otherwise."""
    _verify("program", signed.signature, signed.manifest.canonical(), key)
    if signed.manifest.recipe.id != signed.manifest.recipe_id:
        raise Untrusted("the program's recipe does not have the id that its manifest states")
    return signed.manifest


def sign_adapter(manifest: AdapterManifest, key: Ed25519PrivateKey) -> SignedAdapter:
    """Returns an adapter version's manifest with the server's signature."""
    return SignedAdapter(manifest=manifest, key_id=key_id(key.public_key()), signature=_sign(manifest.canonical(), key))


def verify_adapter(signed: SignedAdapter, key: Ed25519PublicKey) -> AdapterManifest:
    """Returns the manifest if its signature and its recipe id are valid. Raises Untrusted otherwise.

    The caller compares the files with the hashes in the manifest.
    """
    manifest = signed.manifest
    _verify("adapter", signed.signature, manifest.canonical(), key)
    if manifest.recipe.id != manifest.recipe_id or manifest.recipe.base != manifest.base:
        raise Untrusted("the adapter's recipe does not have the id or the base that its manifest states")
    return manifest


def _sign(content: bytes, key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.sign(content)).decode()


def _verify(kind: str, signature: str, content: bytes, key: Ed25519PublicKey) -> None:
    try:
        key.verify(base64.b64decode(signature, validate=True), content)
    except (InvalidSignature, ValueError, binascii.Error) as error:
        raise Untrusted(
            f"the {kind}'s signature is not by the server this device was enrolled with; "
            "if the server's key was changed on purpose, enroll this device again"
        ) from error
