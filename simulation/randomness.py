"""Random numbers of a simulation, derived from its seed and the name of their purpose.

The numbers of a device in a round depend on seed, round and device only, not on the other devices or the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from shared.recipe import MAX_SEED


def _digest(seed: int, *names: object) -> bytes:
    return hashlib.sha256("\n".join(str(part) for part in (seed, *names)).encode()).digest()


def generator(seed: int, *names: object) -> np.random.Generator:
    """Returns a random generator for one purpose."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(_digest(seed, *names)[:16], "little")))


def job_seed(seed: int, *names: object) -> int:
    """Returns a job seed, from 0 to MAX_SEED."""
    return int.from_bytes(_digest(seed, *names)[:8], "little") & MAX_SEED


def entropy(seed: int, *names: object) -> Callable[[int], bytes]:
    """Returns a source of bytes that replaces the operating system's.

    It is predictable: use it for simulations only.
    """
    source = generator(seed, *names)
    return source.bytes
