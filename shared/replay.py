"""Exact replay of a run with Rademacher noise, fast enough to check what a device says it did.

Flat B is taken in blocks that stay in the processor's cache, each through all steps in order, so that every element
sees the same float32 subtractions in the same order as on the device and in `Trajectory.replay`. A Threefry call gives
the signs of 64 elements; eight of them, a byte, choose a row of eight products +-c from a table of the coefficient.
In a run with pulls (`shared.proximal`), a block is pulled towards its own part of the start after each step.
Knows no file, no runtime and no torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared.errors import NotReplayable
from shared.noise import DOMAIN_QUERY, PARITY, ROTATIONS, ROUNDS, SIGNS_PER_CALL, stream_key, threefry2x32
from shared.proximal import pull
from shared.trajectory import F32, Trajectory

U32 = NDArray[np.uint32]

BLOCK_CALLS = 512  # Threefry calls of a block: 32,768 elements of B, 128 KiB
CHUNK_KEYS = 32  # directions whose signs are drawn at once: 64 KiB for each of the generator's two words
BYTE = 8  # signs in a byte, elements in a row of the table


def _sign_table() -> U32:
    """(256, 8): in row b, element j, the sign bit of a float32 if bit j of b is set, which is -1."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return bits.astype(np.uint32) << np.uint32(31)


_SIGNS = _sign_table()


def _words(first: U32, second: U32, spare: U32, keys: U32, counters: U32) -> None:
    """Threefry-2x32-20 of every counter (j, 0) under every key, in place.

    keys: (n, 2). counters: (m,). first, second: (n, m), filled with the two words. spare: (n, m), scratch.
    """
    k0, k1 = keys[:, :1], keys[:, 1:]
    schedule = (k0, k1, k0 ^ k1 ^ np.uint32(PARITY))
    np.add(counters, schedule[0], out=first)
    second[:] = schedule[1]
    for round_ in range(ROUNDS):
        rotation = ROTATIONS[round_ % 8]
        first += second
        np.left_shift(second, np.uint32(rotation), out=spare)
        np.right_shift(second, np.uint32(32 - rotation), out=second)
        second |= spare
        second ^= first
        if round_ % 4 == 3:
            block = round_ // 4 + 1
            first += schedule[block % 3]
            second += schedule[(block + 1) % 3] + np.uint32(block)


def replay(trajectory: Trajectory, start: F32, steps: int | None = None) -> F32:
    """B after `steps` steps (all by default) from `start` (D,), float32 (D,): bit for bit `Trajectory.replay`'s.

    Raises NotReplayable unless the noise is Rademacher: no other is the same on two machines.
    """
    header = trajectory.header
    if header.noise != "rademacher":
        raise NotReplayable(
            f"a run with noise {header.noise!r} is replayed exactly only on the machine that trained it"
        )
    flat = np.array(start, np.float32)  # (D,)
    if flat.shape != (header.size,):
        raise ValueError(f"B of shape {flat.shape} for a run of D = {header.size}")
    coefficients = np.array(trajectory.coefficients[:steps], np.float32).reshape(-1)  # (steps * q,)
    bits = coefficients.view(np.uint32)
    seeds = _seeds(header.job_seed, len(coefficients) // header.queries, header.queries)  # (steps * q, 2)
    pulls = np.array(trajectory.pulls[:steps], np.float32)  # (steps,), or empty
    calls = -(-header.size // SIGNS_PER_CALL)
    # What grows beyond float32 is no B, but the caller's to find.
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(0, calls, BLOCK_CALLS):
            counters = np.arange(at, min(at + BLOCK_CALLS, calls), dtype=np.uint32)
            block = flat[at * SIGNS_PER_CALL : (at + BLOCK_CALLS) * SIGNS_PER_CALL]
            _replay_block(block, counters, seeds, bits, pulls)
    return flat


def _seeds(job_seed: int, steps: int, queries: int) -> U32:
    """The keys of every direction in the run's order, uint32 (steps * q, 2); see `shared.noise.query_seeds`."""
    key = stream_key(job_seed, DOMAIN_QUERY)
    words = threefry2x32(key, np.arange(steps, dtype=np.uint32)[:, None], np.arange(queries, dtype=np.uint32))
    return np.stack(words, axis=2).reshape(-1, 2)


def _replay_block(block: F32, counters: U32, seeds: U32, bits: U32, pulls: F32) -> None:
    """Takes one block of B through the whole run, in place: block -= c z for every (seed, coefficient) in order.

    block: a view of B, at most 64 elements for each of `counters` (m,). seeds: (n, 2). bits: (n,), the coefficients'.
    pulls: the factor of each step's pull; empty in a run without.
    """
    start = block.copy()
    queries = len(seeds) // len(pulls) if len(pulls) else 0
    scratch = np.empty((3, min(CHUNK_KEYS, len(seeds)), len(counters)), np.uint32)
    words = np.empty((*scratch.shape[1:], 2), "<u4")  # (keys, m, 2)
    table = np.empty_like(_SIGNS)
    products = np.empty((len(counters) * SIGNS_PER_CALL // BYTE, BYTE), np.float32)
    update = products.reshape(-1)[: len(block)]
    for at in range(0, len(seeds), CHUNK_KEYS):
        keys = seeds[at : at + CHUNK_KEYS]
        first, second, spare = scratch[:, : len(keys)]
        _words(first, second, spare, keys, counters)
        words[: len(keys), :, 0], words[: len(keys), :, 1] = first, second
        rows = words[: len(keys)].view(np.uint8).reshape(len(keys), -1).astype(np.intp)  # (keys, 8 m)
        for done, (row, coefficient) in enumerate(zip(rows, bits[at : at + CHUNK_KEYS], strict=True), start=at + 1):
            np.bitwise_xor(_SIGNS, coefficient, out=table)
            np.take(table.view(np.float32), row, axis=0, out=products, mode="clip")
            np.subtract(block, update, out=block)
            if queries and done % queries == 0:
                block[:] = pull(block, start, pulls[done // queries - 1])
