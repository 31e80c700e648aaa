"""Ed25519 signatures over manifests. Knows nothing of where keys are kept or sent."""

from __future__ import annotations

import base64
import binascii

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shared.canonical import sha256_hex
from shared.errors import Untrusted
from shared.program import ProgramManifest, SignedManifest


def new_private_key() -> Ed25519PrivateKey:
    """A fresh signing key."""
    return Ed25519PrivateKey.generate()


def private_bytes(key: Ed25519PrivateKey) -> bytes:
    """The 32 raw bytes of a private key."""
    return key.private_bytes(serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption())


def public_text(key: Ed25519PublicKey) -> str:
    """A public key as base64 text of its 32 raw bytes."""
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return base64.b64encode(raw).decode()


def parse_public(text: str) -> Ed25519PublicKey:
    """The public key that `public_text` wrote. Raises Untrusted if it is none."""
    try:
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True))
    except (ValueError, binascii.Error) as error:
        raise Untrusted("the server's public key is not base64 of 32 bytes; enrol this device again") from error


def key_id(key: Ed25519PublicKey) -> str:
    """A short name of a public key: 16 hexadecimal digits of its sha256."""
    return sha256_hex(public_text(key).encode())[:16]


def sign_manifest(manifest: ProgramManifest, key: Ed25519PrivateKey) -> SignedManifest:
    """The manifest with the server's signature."""
    signature = base64.b64encode(key.sign(manifest.canonical())).decode()
    return SignedManifest(manifest=manifest, key_id=key_id(key.public_key()), signature=signature)


def verify_manifest(signed: SignedManifest, key: Ed25519PublicKey) -> ProgramManifest:
    """The manifest, once its signature and its recipe id hold. Raises Untrusted otherwise."""
    try:
        key.verify(base64.b64decode(signed.signature, validate=True), signed.manifest.canonical())
    except (InvalidSignature, ValueError, binascii.Error) as error:
        raise Untrusted(
            "the program's signature is not by the server this device was enrolled with; "
            "if the server's key was changed on purpose, enrol this device again"
        ) from error
    if signed.manifest.recipe.id != signed.manifest.recipe_id:
        raise Untrusted("the program's recipe does not have the id that its manifest states")
    return signed.manifest
