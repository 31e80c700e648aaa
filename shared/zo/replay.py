"""Fast exact replay of a run with Rademacher noise, with which the server verifies a device's trajectory.

Flat B is processed in blocks that fit into the processor's cache, each through all steps in order, so every element
sees the same float32 subtractions in the same order as on the device and in `Trajectory.replay`. One Threefry call
gives the signs of 64 elements. Each byte of signs selects a row of eight products +-c from a table for the coefficient.
In a run with a proximal term (`shared.zo.proximal`), each block moves towards its part of the start after each step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared.errors import NotReplayable
from shared.zo.noise import PARITY, ROTATIONS, ROUNDS, SIGNS_PER_CALL, run_seeds
from shared.zo.proximal import proximal_step
from shared.zo.trajectory import F32, Trajectory

U32 = NDArray[np.uint32]

BLOCK_CALLS = 512  # Threefry calls of a block: 32,768 elements of B, 128 KiB
CHUNK_KEYS = 32  # directions drawn at once: 64 KiB for each of the generator's two words
BYTE = 8  # signs in a byte, elements in a row of the table


def _sign_table() -> U32:
    """Returns (256, 8): in row b, element j, the float32 sign bit if bit j of b is set, which means -1."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return bits.astype(np.uint32) << np.uint32(31)


_SIGNS = _sign_table()


def _threefry_words(first: U32, second: U32, spare: U32, keys: U32, counters: U32) -> None:
    """Computes Threefry-2x32-20 of every counter (j, 0) under every key, in place.

    keys: (n, 2). counters: (m,). first, second: (n, m), outputs for the two words. spare: (n, m), scratch.
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
    """Returns B after `steps` steps (default: all) from `start` (D,), float32 (D,), bit for bit as `Trajectory.replay`.

    Raises NotReplayable unless the noise is Rademacher, since other noise differs between machines, and ValueError for
    a start of another size.
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
    seeds = run_seeds(header.job_seed, len(coefficients) // header.queries, header.queries)
    keys = seeds.view(np.uint32).reshape(-1, 2)  # (steps * q, 2)
    factors = np.array(trajectory.proximal_factors[:steps], np.float32)  # (steps,), or empty
    calls = -(-header.size // SIGNS_PER_CALL)
    # An overflow gives a non-finite B, which the caller detects.
    with np.errstate(over="ignore", invalid="ignore"):
        for first_call in range(0, calls, BLOCK_CALLS):
            counters = np.arange(first_call, min(first_call + BLOCK_CALLS, calls), dtype=np.uint32)
            block = flat[first_call * SIGNS_PER_CALL : (first_call + BLOCK_CALLS) * SIGNS_PER_CALL]
            _replay_block(block, counters, keys, bits, factors)
    return flat


def _replay_block(block: F32, counters: U32, seeds: U32, bits: U32, factors: F32) -> None:
    """Replays the whole run on one block of B, in place: block -= c z for every (seed, coefficient) in order.

    block: a view of B, at most 64 elements for each of `counters` (m,). seeds: (n, 2). bits: (n,), the coefficients as
    uint32. factors: of each proximal step; empty in a run without them.
    """
    start = block.copy()
    queries = len(seeds) // len(factors) if len(factors) else 0
    scratch = np.empty((3, min(CHUNK_KEYS, len(seeds)), len(counters)), np.uint32)
    words = np.empty((*scratch.shape[1:], 2), "<u4")  # (keys, m, 2)
    table = np.empty_like(_SIGNS)
    products = np.empty((len(counters) * SIGNS_PER_CALL // BYTE, BYTE), np.float32)
    update = products.reshape(-1)[: len(block)]
    for start_key in range(0, len(seeds), CHUNK_KEYS):
        keys = seeds[start_key : start_key + CHUNK_KEYS]
        first, second, spare = scratch[:, : len(keys)]
        _threefry_words(first, second, spare, keys, counters)
        words[: len(keys), :, 0], words[: len(keys), :, 1] = first, second
        rows = words[: len(keys)].view(np.uint8).reshape(len(keys), -1).astype(np.intp)  # (keys, 8 m)
        for replayed, (row, coefficient) in enumerate(
            zip(rows, bits[start_key : start_key + CHUNK_KEYS], strict=True), start=start_key + 1
        ):
            np.bitwise_xor(_SIGNS, coefficient, out=table)
            np.take(table.view(np.float32), row, axis=0, out=products, mode="clip")
            np.subtract(block, update, out=block)
            if queries and replayed % queries == 0:
                block[:] = proximal_step(block, start, factors[replayed // queries - 1])
