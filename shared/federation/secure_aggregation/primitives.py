"""The cryptographic primitives of secure aggregation, all from the `cryptography` package.

agreement      X25519 (RFC 7748), then HKDF-SHA256 (RFC 5869) with the key's purpose and context
delivery       ChaCha20-Poly1305 (RFC 8439) under a key of one sender and one recipient
signatures     Ed25519 (RFC 8032) by the device's identity key
masks          ChaCha20 streams (RFC 8439) as integers, added to a vector modulo 2^32 or 2^64
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shared.errors import Untrusted
from shared.federation.secure_aggregation.fixed_point import IntegerVector

BLOCK_BYTES = 1 << 18  # block of a stream: fits into the cache and amortizes the call overhead
_ZEROS = bytes(BLOCK_BYTES)
_NONCE = bytes(16)  # block counter 0 and nonce 0, since each key is used for one stream only


def add_mask(vector: IntegerVector, key: bytes, sign: int) -> None:
    """Adds (sign 1) or subtracts (sign -1) the stream of a 32-byte key, in place. vector: (L,), little-endian words."""
    stream = Cipher(algorithms.ChaCha20(key, _NONCE), None).encryptor()
    block = np.empty(BLOCK_BYTES // vector.itemsize, vector.dtype)
    for start in range(0, len(vector), len(block)):
        segment = vector[start : start + len(block)]
        mask = block[: len(segment)]
        stream.update_into(_ZEROS[: mask.nbytes], mask.data.cast("B"))
        if sign > 0:
            np.add(segment, mask, out=segment)
        else:
            np.subtract(segment, mask, out=segment)


KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16


def new_secret() -> bytes:
    """Returns 32 bytes from the operating system's random source: a private key or a seed."""
    return secrets.token_bytes(KEY_BYTES)


def public_of(private: bytes) -> bytes:
    """Returns the X25519 public key of a private key, 32 bytes each."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, purpose: bytes, context: bytes) -> bytes:
    """Returns a 32-byte key shared by the owners of two X25519 keys, for one purpose and in one context.

    Raises Untrusted for a public key of small order, with which the shared key would not be secret.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise Untrusted("a device advertised a weak key: it gives no shared secret") from error
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=context, info=b"mobizo masking " + purpose).derive(shared)


def check_public(public: bytes) -> None:
    """Raises Untrusted for an unusable X25519 public key."""
    agree(new_secret(), public, b"check", b"")


def seal(key: bytes, secret: bytes, associated_data: bytes) -> bytes:
    """Encrypts for the other holder of `key`.

    `associated_data` is authenticated and must be the same for decryption.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, secret, associated_data)


def unseal(key: bytes, sealed: bytes, associated_data: bytes) -> bytes:
    """Decrypts the output of `seal`. Raises Untrusted for anything else."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], associated_data)
    except (InvalidTag, ValueError) as error:
        raise Untrusted("a share cannot be decrypted: it does not come from the stated device") from error


def commitment(seed: bytes, context: bytes) -> bytes:
    """Returns a sha256 commitment to a seed. It reveals nothing about the seed, which is 32 random bytes."""
    return hashlib.sha256(b"mobizo masking seed\n" + context + seed).digest()


def sign(key: Ed25519PrivateKey, message: bytes) -> bytes:
    """Returns a signature of 64 bytes."""
    return key.sign(message)


def check_signature(public: bytes, signature: bytes, message: bytes, device_id: str) -> None:
    """Raises Untrusted unless `signature` is valid. device_id: for the error message."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise Untrusted(f"a message of device {device_id} does not have a valid signature of its key") from error
