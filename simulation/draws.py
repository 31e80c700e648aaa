"""Every random number of a simulation, from its one seed and the name of what it is for.

What a device draws in a round depends on seed, round and device alone: not on who else takes part, nor on which
process it runs in. Knows nothing of what is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from shared.recipe import MAX_SEED


def _digest(seed: int, *names: object) -> bytes:
    return hashlib.sha256("\n".join(str(part) for part in (seed, *names)).encode()).digest()


def generator(seed: int, *names: object) -> np.random.Generator:
    """A generator for one purpose."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(_digest(seed, *names)[:16], "little")))


def job_seed(seed: int, *names: object) -> int:
    """A seed as jobs have them."""
    return int.from_bytes(_digest(seed, *names)[:8], "little") & MAX_SEED


def entropy(seed: int, *names: object) -> Callable[[int], bytes]:
    """Bytes in place of the operating system's. What they protect is protected from nobody: for simulations only."""
    drawn = generator(seed, *names)
    return drawn.bytes
