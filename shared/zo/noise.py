"""NumPy reference of the noise: Threefry-2x32-20, Rademacher and Gaussian directions, and seed derivation.

Threefry is from Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11. The compiler writes the same
arithmetic into the program's graph; server, agent and tests use this module for replay.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared.errors import Conflict

U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]
Seed = tuple[int, int]  # two 32-bit words as signed int32, as the programs' inputs

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
ROUNDS = 20
SIGNS_PER_CALL = 64  # two 32-bit words

# Each domain has a separate stream of random numbers for the same seed.
DOMAIN_QUERY = 1
DOMAIN_ORDER = 2
DOMAIN_A = 3
DOMAIN_DROPOUT = 4
DOMAIN_COUNTER = 0xFFFFFFFF


def threefry2x32(key: tuple[int, int], counter0: U32 | int, counter1: U32 | int) -> tuple[U32, U32]:
    """Computes Threefry-2x32 with 20 rounds: two words for each counter.

    key: two 32-bit words (signed or unsigned). counter0, counter1: broadcastable uint32 arrays or integers.
    Returns two uint32 arrays of the counters' broadcast shape.
    """
    k0, k1 = (np.uint32(word & 0xFFFFFFFF) for word in key)
    schedule = (k0, k1, k0 ^ k1 ^ np.uint32(PARITY))
    first, second = np.broadcast_arrays(np.atleast_1d(np.asarray(counter0, np.uint32)), np.asarray(counter1, np.uint32))
    x0, x1 = first + schedule[0], second + schedule[1]
    for round_ in range(ROUNDS):
        rotation = ROTATIONS[round_ % 8]
        x0 = x0 + x1
        x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
        x1 = x1 ^ x0
        if round_ % 4 == 3:
            block = round_ // 4 + 1
            x0 = x0 + schedule[block % 3]
            x1 = x1 + schedule[(block + 1) % 3]
            x1 = x1 + np.uint32(block)
    return x0, x1


def rademacher(seed: Seed, size: int) -> F32:
    """Returns z in {-1, +1}^size, float32 (size,).

    Element 64 j + b is bit b of call j (low word first). A set bit means -1.
    """
    calls = -(-size // SIGNS_PER_CALL)
    words = np.stack(threefry2x32(seed, np.arange(calls, dtype=np.uint32), 0), axis=1)  # (calls, 2)
    bits = np.unpackbits(words.astype("<u4").view(np.uint8).reshape(-1), bitorder="little")[:size]
    return np.float32(1) - np.float32(2) * bits.astype(np.float32)


def gaussian(seed: Seed, size: int) -> F32:
    """Returns z ~ N(0, I), float32 (size,), by Box-Muller. Call j gives elements 2j (cosine) and 2j + 1 (sine)."""
    x0, x1 = threefry2x32(seed, np.arange(-(-size // 2), dtype=np.uint32), 0)
    u1 = ((x0 >> np.uint32(8)).astype(np.float32) + np.float32(1)) * np.float32(2**-24)  # (0, 1]
    u2 = (x1 >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)  # [0, 1)
    radius = np.sqrt(np.float32(-2) * np.log(u1))
    angle = np.float32(2 * np.pi) * u2
    return np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1).reshape(-1)[:size].astype(np.float32)


def direction(noise: str, seed: Seed, size: int) -> F32:
    """Returns the direction z of one query, float32 (size,). `noise` is a recipe's noise.

    Raises Conflict for `randn`, the runtime's own generator, whose directions have no seed and cannot be reproduced.
    """
    if noise == "randn":
        raise Conflict(
            "noise 'randn' cannot be reproduced, so this run has no replay; train with 'gaussian' to get one"
        )
    return {"rademacher": rademacher, "gaussian": gaussian, "operator": gaussian}[noise](seed, size)


def _words(seed: int) -> tuple[int, int]:
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def stream_key(seed: int, domain: int) -> tuple[int, int]:
    """Returns the Threefry key of a domain's stream under a 53-bit seed."""
    x0, x1 = threefry2x32(_words(seed), domain, DOMAIN_COUNTER)
    return int(x0[0]), int(x1[0])


def query_seeds(job_seed: int, step: int, queries: int) -> NDArray[np.int32]:
    """Returns the seeds of one step's queries, int32 (queries, 2), derived from (job seed, step, query)."""
    key = stream_key(job_seed, DOMAIN_QUERY)
    x0, x1 = threefry2x32(key, step, np.arange(queries, dtype=np.uint32))
    return np.stack((x0, x1), axis=1).view(np.int32)


def run_seeds(job_seed: int, steps: int, queries: int) -> NDArray[np.int32]:
    """Returns the seeds of all queries of a run's first steps, int32 (steps, queries, 2).

    They equal `query_seeds` of each step.
    """
    key = stream_key(job_seed, DOMAIN_QUERY)
    words = threefry2x32(key, np.arange(steps, dtype=np.uint32)[:, None], np.arange(queries, dtype=np.uint32))
    return np.stack(words, axis=2).view(np.int32)


def permutation(job_seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Returns the order of `size` examples in one epoch, int64 (size,), by sorting 64-bit random keys."""
    key = stream_key(job_seed, DOMAIN_ORDER)
    epoch_key = threefry2x32(key, epoch, 0)
    x0, x1 = threefry2x32((int(epoch_key[0][0]), int(epoch_key[1][0])), np.arange(size, dtype=np.uint32), 0)
    keys = (x0.astype(np.uint64) << np.uint64(32)) | x1.astype(np.uint64)
    return np.argsort(keys, kind="stable")


def uniform(key: tuple[int, int], size: int) -> F32:
    """Returns u in [-1, 1) on a grid of 2^-23, float32 (size,). The values are exact and the same on every machine."""
    x0, x1 = threefry2x32(key, np.arange(-(-size // 2), dtype=np.uint32), 0)
    words = np.stack((x0, x1), axis=1).reshape(-1)[:size] >> np.uint32(8)  # 24 bits
    return words.astype(np.float32) * np.float32(2**-23) - np.float32(1)
