"""FedProx's proximal step: after each training step, B is moved towards the B that the run started from.

FedProx (Li et al., MLSys 2020, eq. 2) adds (mu / 2) ||B - B0||^2 to a device's loss, so that devices with different
data do not drift apart. The gradient of the term is known and needs no forward pass: after a step with learning rate
eta, a gradient step on the term gives B0 + (1 - eta mu) (B - B0). The factor is stored with the step, and the
arithmetic is three float32 operations in a fixed order, so such a run replays bit for bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def proximal_factor(lr: float, mu: float) -> np.float32:
    """Returns 1 - lr mu, the factor of a proximal step: B's distance from the start after it over the one before.

    Raises ValueError if lr mu > 1, which would overshoot the start.
    """
    if lr * mu > 1:
        raise ValueError(f"mu {mu} overshoots the start at learning rate {lr}; lr * mu must be at most 1")
    return np.float32(1.0 - lr * mu)


def proximal_step(flat: F32, start: F32, factor: np.float32) -> F32:
    """Returns start + factor (flat - start), float32 (D,).

    Each operation is rounded separately.
    """
    moved = flat - start
    moved *= factor
    moved += start
    return moved
