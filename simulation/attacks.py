"""Attacks of poisoned devices: on their labels before training, or on the numbers they send.

An attack on the numbers applies to either form of upload: an update of B (D,) or a trajectory's coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shared.zo.encoding import Example
from simulation.randomness import generator
from simulation.settings import FaultSettings

F32 = NDArray[np.float32]
DATA_ATTACKS = ("labels", "claims")  # attacks that do not change the numbers
CLAIMED_EXAMPLES = 2**31 - 1  # number of examples reported by attack `claims`


def poisoned_devices(settings: FaultSettings, devices: int, seed: int) -> frozenset[int]:
    """Returns the devices that attack, the same in every round."""
    count = round(settings.poisoned * devices)
    return frozenset(generator(seed, "poisoned").permutation(devices)[:count].tolist())


def poison_examples(settings: FaultSettings, examples: Sequence[Example]) -> Sequence[Example]:
    """Returns a poisoned device's training examples: attack `labels` replaces each correct answer by the next one."""
    if settings.attack != "labels":
        return examples
    return [replace(example, correct=(example.correct + 1) % len(example.rows)) for example in examples]


def poison_numbers(settings: FaultSettings, numbers: F32, seed: int, round_: int, device: int) -> F32:
    """Returns the numbers that a poisoned device sends instead of `numbers`."""
    scale = np.float32(settings.strength)
    if settings.attack == "sign_flip":
        return -scale * numbers
    if settings.attack == "huge":
        return scale * numbers
    if settings.attack == "not_finite":
        return np.full_like(numbers, np.nan)
    if settings.attack in ("random", "collusion"):
        # Colluding devices send equal numbers, which form a cluster.
        name = device if settings.attack == "random" else "all"
        noise = generator(seed, "attack", round_, name).standard_normal(numbers.shape)
        return (scale * noise * (np.abs(numbers).mean() or 1.0)).astype(np.float32)
    return numbers


def claimed_examples(settings: FaultSettings, examples: int) -> int:
    """Returns the number of training examples that a poisoned device reports."""
    return CLAIMED_EXAMPLES if settings.attack == "claims" else examples
