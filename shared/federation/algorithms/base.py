"""Base classes of federated algorithms: a device half and a server half, which implement federated averaging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.federation.update import F32, difference


@dataclass(frozen=True)
class DeviceHalf:
    """What a device does in addition to plain training steps, and how its update is computed."""

    mu: float = 0.0  # strength of the pull towards the round's start

    @property
    def pulls(self) -> bool:
        """Whether B is pulled towards its start between steps (FedProx)."""
        return self.mu > 0

    def pull_factor(self, lrs: Sequence[float]) -> np.float32:
        """Returns the factor of B - B_start after one pull at each of these steps' learning rates: prod (1 - lr mu).

        A pull is one gradient step on mu/2 |B - B_start|^2; `shared.zo.proximal` applies it. Raises ValueError if lr mu
        > 1, which would overshoot.
        """
        if any(lr * self.mu > 1 for lr in lrs):
            raise ValueError(
                f"mu {self.mu} overshoots the start at learning rate {max(lrs)}; lr * mu must be at most 1"
            )
        factor = 1.0
        for lr in lrs:
            factor *= 1 - lr * self.mu
        return np.float32(factor)

    def update(self, after: F32, start: F32) -> F32:
        """Returns the update for the round, float32 (D,)."""
        return difference(after, start)


@dataclass(frozen=True)
class ServerHalf:
    """Decides which updates are accepted, with which factor, and when a round is complete."""

    def accepts(self, staleness: int) -> bool:
        """Whether an update that started `staleness` versions ago is accepted.

        In a synchronous round all have the same start.
        """
        return staleness == 0

    def scale(self, staleness: int) -> float:
        """Returns the factor of an update of this staleness. The divisor of the mean does not include it."""
        return 1.0

    def full(self, updates: int, asked: int) -> bool:
        """Whether the round ends before its deadline, because all members have answered."""
        return updates >= asked


@dataclass(frozen=True)
class Algorithm:
    """Both halves of an algorithm. Server, agent and simulation share them."""

    device: DeviceHalf = field(default_factory=DeviceHalf)
    server: ServerHalf = field(default_factory=ServerHalf)
