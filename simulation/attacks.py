"""What a poisoned device does: to its labels before it trains, or to what it sends after.

An attack is on the numbers that are sent, whatever these are: an update of B (D,), or a trajectory's coefficients.
Knows no aggregator; which of them withstands what is `shared.federation`'s matter and its tests'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shared.encoding import Example
from simulation.draws import generator
from simulation.settings import FaultSettings

F32 = NDArray[np.float32]
ON_DATA = ("labels", "claims")  # attacks that leave the numbers as they came out
CLAIM = 2**31 - 1  # examples that a liar says it trained on


def poisoned(settings: FaultSettings, devices: int, seed: int) -> frozenset[int]:
    """The devices that attack, the same in every round."""
    count = round(settings.poisoned * devices)
    return frozenset(generator(seed, "poisoned").permutation(devices)[:count].tolist())


def spoil_examples(settings: FaultSettings, examples: Sequence[Example]) -> Sequence[Example]:
    """What it trains on: of attack `labels` each next answer in place of the right one."""
    if settings.attack != "labels":
        return examples
    return [replace(example, correct=(example.correct + 1) % len(example.rows)) for example in examples]


def spoil_numbers(settings: FaultSettings, numbers: F32, seed: int, round_: int, device: int) -> F32:
    """What it sends in place of `numbers`."""
    scale = np.float32(settings.strength)
    if settings.attack == "sign_flip":
        return -scale * numbers
    if settings.attack == "huge":
        return scale * numbers
    if settings.attack == "not_finite":
        return np.full_like(numbers, np.nan)
    if settings.attack in ("random", "collusion"):
        # Those who collude send the same, so that they look like a cluster.
        name = device if settings.attack == "random" else "all"
        noise = generator(seed, "attack", round_, name).standard_normal(numbers.shape)
        return (scale * noise * (np.abs(numbers).mean() or 1.0)).astype(np.float32)
    return numbers


def claimed(settings: FaultSettings, examples: int) -> int:
    """How many examples it says it trained on."""
    return CLAIM if settings.attack == "claims" else examples
