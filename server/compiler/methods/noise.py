"""The noise of `shared.zo.noise` as tensor operations that every ExecuTorch runtime supports.

Threefry-2x32-20 is computed by wrapping int32 additions, xors and shifts, over one flat vector for all queries at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.recipe import Noise
from shared.zo.noise import PARITY, ROTATIONS, ROUNDS, SIGNS_PER_CALL

LOW_24 = 0xFFFFFF


def directions(noise: Noise, seeds: Tensor, size: int) -> Tensor:
    """Returns the direction z of every query, float32 (q, size). seeds: int32 (q, 2).

    It does not support `randn`, which takes no seeds, and `operator`, which is a single custom operator.
    """
    return {"rademacher": rademacher, "gaussian": gaussian}[noise](seeds, size)


def rademacher(seeds: Tensor, size: int) -> Tensor:
    """Returns z in {-1, +1}, float32 (q, size). Bit b of call j is element 64 j + b, low word first; a set bit is -1.

    The eight signs of a byte are one row of a table, because copying rows is much faster than extracting single bits.
    """
    calls = -(-size // SIGNS_PER_CALL)
    words = torch.stack(_threefry(seeds, calls), dim=2).reshape(-1, 2 * calls, 1)  # (q, 2 calls, 1)
    shifts = torch.arange(0, 32, 8, dtype=torch.int32).reshape(1, 1, 4)
    bytes_ = torch.bitwise_and(torch.bitwise_right_shift(words, shifts), 0xFF)  # (q, 2 calls, 4)
    signs = torch.nn.functional.embedding(bytes_.reshape(-1, 8 * calls), _signs())  # (q, 8 calls, 8)
    flat = signs.reshape(-1, SIGNS_PER_CALL * calls)
    return flat if flat.shape[1] == size else flat[:, :size]


def _signs() -> Tensor:
    """Returns the signs of the bits of every byte, float32 (256, 8). A loop in a program can have no constant."""
    bits = torch.bitwise_right_shift(torch.arange(256).reshape(256, 1), torch.arange(8).reshape(1, 8))
    return 1.0 - 2.0 * torch.bitwise_and(bits, 1).to(torch.float32)


def gaussian(seeds: Tensor, size: int) -> Tensor:
    """Returns z ~ N(0, 1), float32 (q, size), by Box-Muller: call j gives elements 2 j (cosine) and 2 j + 1 (sine)."""
    calls = -(-size // 2)
    x0, x1 = _threefry(seeds, calls)  # (q, calls)
    u1 = (_high_24(x0).to(torch.float32) + 1.0) * 2**-24  # (0, 1]
    u2 = _high_24(x1).to(torch.float32) * 2**-24  # [0, 1)
    radius = torch.sqrt(torch.log(u1) * -2.0)
    angle = u2 * (2 * math.pi)
    pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=2)
    return pairs.reshape(-1, 2 * calls)[:, :size]


def _high_24(words: Tensor) -> Tensor:
    """Returns the upper 24 bits. The mask removes the sign bits of int32's arithmetic shift."""
    return torch.bitwise_and(torch.bitwise_right_shift(words, 8), LOW_24)


def _rotate_left(words: Tensor, count: int) -> Tensor:
    low = torch.bitwise_and(torch.bitwise_right_shift(words, 32 - count), (1 << count) - 1)
    return torch.bitwise_or(torch.bitwise_left_shift(words, count), low)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _threefry(seeds: Tensor, calls: int) -> tuple[Tensor, Tensor]:
    """Returns both words of calls 0 to calls - 1 (counter (j, 0)) under each key: two int32 tensors (q, calls)."""
    k0, k1 = seeds[:, 0:1], seeds[:, 1:2]  # (q, 1)
    schedule = (k0, k1, torch.bitwise_xor(torch.bitwise_xor(k0, k1), _signed(PARITY)))
    x0 = torch.arange(calls, dtype=torch.int32).reshape(1, -1) + k0
    x1 = torch.zeros((1, calls), dtype=torch.int32) + k1
    for round_ in range(ROUNDS):
        x0 = x0 + x1
        x1 = torch.bitwise_xor(_rotate_left(x1, ROTATIONS[round_ % 8]), x0)
        if round_ % 4 == 3:
            block = round_ // 4 + 1
            x0 = x0 + schedule[block % 3]
            x1 = x1 + (schedule[(block + 1) % 3] + block)
    return x0, x1
