"""The proximal pull: after each step, B goes a little way back towards the B that the run began from.

FedProx (Li et al., MLSys 2020, eq. 2) adds (mu / 2) ||B - B0||^2 to a device's loss, so that devices whose data differ
do not drift apart. The term's gradient is known and takes no forward pass: after a step at learning rate eta, its own
step leaves B0 + (1 - eta mu) (B - B0). The factor is stored with the step, and the arithmetic is three float32
operations in a fixed order, so that a run with pulls is replayed to the bit like any other. Knows no file and no
runtime.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def pull_factor(lr: float, mu: float) -> np.float32:
    """What B's distance from the start is multiplied with after a step at rate `lr`: 1 - lr mu.

    Raises ValueError where lr mu > 1, which would overshoot the start.
    """
    if lr * mu > 1:
        raise ValueError(f"mu {mu} pulls past the start at learning rate {lr}: take lr * mu <= 1")
    return np.float32(1.0 - lr * mu)


def pull(flat: F32, start: F32, factor: np.float32) -> F32:
    """start + factor (flat - start), float32 (D,), each operation rounded by itself as in runner/trainer.cpp."""
    moved = flat - start
    moved *= factor
    moved += start
    return moved
