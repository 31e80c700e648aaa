"""Masks: ChaCha20 streams (RFC 8439) as integers, added to or subtracted from a vector modulo 2^32 or 2^64."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from shared.federation.secure_aggregation.fixed_point import Words

BLOCK_BYTES = 1 << 18  # block of a stream: fits into the cache and amortizes the call overhead
_ZEROS = bytes(BLOCK_BYTES)
_NONCE = bytes(16)  # block counter 0 and nonce 0, since each key is used for one stream only


def add_mask(vector: Words, key: bytes, sign: int) -> None:
    """Adds (sign 1) or subtracts (sign -1) the stream of a 32-byte key, in place. vector: (L,), little-endian words."""
    stream = Cipher(algorithms.ChaCha20(key, _NONCE), None).encryptor()
    block = np.empty(BLOCK_BYTES // vector.itemsize, vector.dtype)
    for begin in range(0, len(vector), len(block)):
        part = vector[begin : begin + len(block)]
        mask = block[: len(part)]
        stream.update_into(_ZEROS[: mask.nbytes], mask.data.cast("B"))
        if sign > 0:
            np.add(part, mask, out=part)
        else:
            np.subtract(part, mask, out=part)
