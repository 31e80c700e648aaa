"""What an algorithm of federation is: a device half and a server half.

The plain halves here are federated averaging's; an algorithm's own file says what it does otherwise.
Knows no program, no database and no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.federation.update import F32, difference


@dataclass(frozen=True)
class DeviceHalf:
    """What a device does beside the plain steps of its own job, and what it sends."""

    mu: float = 0.0  # strength of the pull towards the round's start

    @property
    def pulls(self) -> bool:
        """Whether B is pulled between steps; if not, the steps are those of any job."""
        return self.mu > 0

    def pull_factor(self, lrs: Sequence[float]) -> np.float32:
        """What is left of B - B_start after a pull at each of these steps' learning rates: prod (1 - lr mu).

        A pull is one gradient step on mu/2 |B - B_start|^2; `shared.proximal` applies it. Raises ValueError where
        lr mu > 1, which would overshoot.
        """
        if any(lr * self.mu > 1 for lr in lrs):
            raise ValueError(f"mu {self.mu} pulls past the start at learning rate {max(lrs)}: take lr * mu <= 1")
        factor = 1.0
        for lr in lrs:
            factor *= 1 - lr * self.mu
        return np.float32(factor)

    def update(self, after: F32, start: F32) -> F32:
        """What counts for the round, float32 (D,)."""
        return difference(after, start)


@dataclass(frozen=True)
class ServerHalf:
    """Which updates count, how much each, and when there are enough."""

    def accepts(self, staleness: int) -> bool:
        """Whether an update counts that began `staleness` versions ago. A synchronous round has one start."""
        return staleness == 0

    def scale(self, staleness: int) -> float:
        """What an update is multiplied by before it is averaged; the divisor does not see it."""
        return 1.0

    def full(self, updates: int, asked: int) -> bool:
        """Whether the round ends before its deadline: all who were asked have answered."""
        return updates >= asked


@dataclass(frozen=True)
class Algorithm:
    """Both halves; server, agent and simulation use these same ones."""

    device: DeviceHalf = field(default_factory=DeviceHalf)
    server: ServerHalf = field(default_factory=ServerHalf)
