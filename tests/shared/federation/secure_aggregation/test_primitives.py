"""Mask streams equal ChaCha20's published vectors, and subtracting a mask reverses adding it."""

import hmac

import numpy as np
import pytest

from shared.federation.secure_aggregation.primitives import BLOCK_BYTES, add_mask, agree, public_of

# RFC 8439, A.1, test vectors 1 and 2: key and nonce zero, blocks 0 and 1.
STREAM = bytes.fromhex(
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
    "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
)


@pytest.mark.parametrize("kind", ["<u4", "<u8"])
def test_a_mask_is_the_published_stream(kind):
    vector = np.zeros(len(STREAM) // np.dtype(kind).itemsize, kind)
    add_mask(vector, bytes(32), 1)
    assert vector.tobytes() == STREAM


@pytest.mark.parametrize("kind", ["<u4", "<u8"])
@pytest.mark.parametrize("extra", [-1, 0, 1, 7])
def test_subtracting_a_mask_restores_the_vector(kind, extra):
    length = 2 * BLOCK_BYTES // np.dtype(kind).itemsize + extra
    before = np.arange(length).astype(kind)
    vector = before.copy()
    add_mask(vector, bytes([7]) * 32, 1)
    assert np.count_nonzero(vector == before) < 4
    add_mask(vector, bytes([7]) * 32, -1)
    assert np.array_equal(vector, before)


def test_agreement_is_the_published_one_and_bound_to_purpose_and_context():
    # RFC 7748, 6.1: Bob's private key, Alice's public key, and their shared secret.
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    alice = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    shared = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert public_of(bob).hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    # RFC 5869: extract with the context as salt, then one block of expansion.
    extracted = hmac.digest(b"round", shared, "sha256")
    key = agree(bob, alice, b"masking", b"round")
    assert key == hmac.digest(extracted, b"mobizo masking masking\x01", "sha256")
    assert key not in (agree(bob, alice, b"sealing", b"round"), agree(bob, alice, b"masking", b"other"))
