"""Shamir's secret sharing ("How to share a secret", CACM 1979) of 32-byte secrets, t of n.

A secret is the value at zero of a polynomial of degree t - 1 over a prime field; the share of device i is its value at
i. Fewer than t shares reveal nothing about the secret. The running time of Python's integers depends on their values,
so precise timing of a device may reveal something about its shares, which are valid for one round only.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from shared.errors import Untrusted

PRIME = 2**256 + 297  # the smallest prime above 2^256
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Returns shares 1 to `count` of a 32-byte secret, 33 bytes each. Any `threshold` of them reconstruct it."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise ValueError(f"{threshold} of {count} shares of {len(secret)} bytes")
    polynomial = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [evaluate(polynomial, point).to_bytes(SHARE_BYTES, "big") for point in range(1, count + 1)]


def evaluate(polynomial: Sequence[int], point: int) -> int:
    """Returns the value at `point` of a polynomial, by Horner's rule. The coefficients start with the constant."""
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * point + coefficient) % PRIME
    return value


def weights_at_zero(points: Sequence[int]) -> list[int]:
    """Returns the Lagrange weights: the value at zero is the sum of each share times its weight."""
    weights = []
    for point in points:
        numerator = denominator = 1
        for other in points:
            if other != point:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - point) % PRIME
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return weights


def combine(shares: Mapping[int, bytes], weights: Sequence[int] | None = None) -> bytes:
    """Reconstructs the secret from t shares by point.

    weights: `weights_at_zero` of the same points, if already computed.

    Raises Untrusted for shares that do not give a 32-byte secret.
    """
    if weights is None:
        weights = weights_at_zero(list(shares))
    total = sum(int.from_bytes(share, "big") * weight for share, weight in zip(shares.values(), weights, strict=True))
    secret = total % PRIME
    if secret >> (8 * SECRET_BYTES):
        raise Untrusted("the shares of a secret are inconsistent: a device sent a share that it was not given")
    return secret.to_bytes(SECRET_BYTES, "big")
