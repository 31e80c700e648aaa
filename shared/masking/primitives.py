"""The cryptography that masking stands on, all of it from the `cryptography` package.

    agreement      X25519 (RFC 7748), then HKDF-SHA256 (RFC 5869) over what the key is for and whose it is
    delivery       ChaCha20-Poly1305 (RFC 8439) under a key of one sender and one recipient
    signatures     Ed25519 (RFC 8032) by the key that a device enrolled with

Knows no phases.
"""

from __future__ import annotations

import hashlib
import secrets

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shared.errors import Untrusted

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16


def new_secret() -> bytes:
    """32 bytes from the system's source of randomness: a private key, or a seed."""
    return secrets.token_bytes(KEY_BYTES)


def public_of(private: bytes) -> bytes:
    """The X25519 public key of a private one, 32 bytes each."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, purpose: bytes, context: bytes) -> bytes:
    """32 bytes that the owners of two X25519 keys have in common, for one purpose and in one context.

    Raises Untrusted for a public key of small order, with which anybody would know them.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise Untrusted("a device advertised a key that keeps nothing secret") from error
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=context, info=b"mobizo masking " + purpose).derive(shared)


def check_public(public: bytes) -> None:
    """Raises Untrusted for what cannot be agreed with as an X25519 public key."""
    agree(new_secret(), public, b"check", b"")


def seal(key: bytes, secret: bytes, about: bytes) -> bytes:
    """Encrypts for the one other holder of `key`; `about` goes beside it and must be the same to open it."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, secret, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """What `seal` encrypted. Raises Untrusted for anything else."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], about)
    except (InvalidTag, ValueError) as error:
        raise Untrusted("a share does not open: it is not from the device that it is said to be from") from error


def commitment(seed: bytes, context: bytes) -> bytes:
    """sha256 that holds a device to its seed and, the seed being 32 random bytes, tells nothing of it."""
    return hashlib.sha256(b"mobizo masking seed\n" + context + seed).digest()


def sign(key: Ed25519PrivateKey, said: bytes) -> bytes:
    """64 bytes of signature."""
    return key.sign(said)


def check_signature(public: bytes, signature: bytes, said: bytes, who: str) -> None:
    """Raises Untrusted unless the owner of an Ed25519 key said just that. who: the device, for the message."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, said)
    except (InvalidSignature, ValueError) as error:
        raise Untrusted(f"what device {who} is said to have sent is not signed by its key") from error
