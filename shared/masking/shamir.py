"""Shamir's secret sharing ("How to share a secret", CACM 1979) of 32-byte secrets, t of n.

A secret is the value at zero of a polynomial of degree t - 1 over a prime field; device i's share is its value at i.
Fewer than t shares fit every secret equally well. Python's integers take a time that depends on their values, so who
measures a device's computing finely may learn something of its shares; they are of one round only.

Knows no devices.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from shared.errors import Untrusted

PRIME = 2**256 + 297  # the smallest over every 32-byte secret
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares 1 to `count` of a 32-byte secret, 33 bytes each, of which any `threshold` give it back."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise ValueError(f"{threshold} of {count} shares of {len(secret)} bytes")
    polynomial = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [evaluate(polynomial, point).to_bytes(SHARE_BYTES, "big") for point in range(1, count + 1)]


def evaluate(polynomial: Sequence[int], point: int) -> int:
    """The value at `point` of a polynomial with these coefficients, the constant first (Horner's rule)."""
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * point + coefficient) % PRIME
    return value


def weights_at_zero(points: Sequence[int]) -> list[int]:
    """Lagrange's weights: the value at zero is the sum of each share times its weight."""
    weights = []
    for one in points:
        above = below = 1
        for other in points:
            if other != one:
                above = above * other % PRIME
                below = below * (other - one) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


def combine(shares: Mapping[int, bytes], weights: Sequence[int] | None = None) -> bytes:
    """The secret of t shares by their points. weights: `weights_at_zero` of the same points, if they are at hand.

    Raises Untrusted for shares that are of no 32-byte secret.
    """
    if weights is None:
        weights = weights_at_zero(list(shares))
    total = sum(int.from_bytes(share, "big") * weight for share, weight in zip(shares.values(), weights, strict=True))
    secret = total % PRIME
    if secret >> (8 * SECRET_BYTES):
        raise Untrusted("the shares of a secret do not fit together: one of the devices sent another than it was given")
    return secret.to_bytes(SECRET_BYTES, "big")
