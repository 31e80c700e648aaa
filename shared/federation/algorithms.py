"""The federated algorithms by name. Each has a part for the device and one for the server.

fedavg    McMahan et al., AISTATS 2017: all devices start from one version; the mean update gives the next one
fedprox   Li et al., MLSys 2020: as fedavg, and devices also minimize mu/2 |B - B_start|^2. The gradient of this term
          needs no forward pass: m proximal steps at rate lr mu are B <- B_start + (1 - lr mu)^m (B - B_start)
fedbuff   Nguyen et al., AISTATS 2022: asynchronous; every K updates make a version, whatever they started from
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.federation.cohort import AlgorithmSettings
from shared.federation.update import F32, difference


@dataclass(frozen=True)
class DeviceAlgorithm:
    """What a device does in addition to plain training steps, and how its update is computed."""

    mu: float = 0.0  # strength of the proximal term

    @property
    def has_proximal_term(self) -> bool:
        """Whether B moves towards its start after each step (FedProx)."""
        return self.mu > 0

    def proximal_factor(self, lrs: Sequence[float]) -> np.float32:
        """Returns the factor of B - B_start after one proximal step at each of these
        learning rates: prod (1 - lr mu).

        A proximal step is one gradient step on mu/2 |B - B_start|^2; `shared.zo.proximal` applies it. Raises ValueError
        if lr mu > 1, which would overshoot.
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
class ServerAlgorithm:
    """Decides which updates are accepted, with which factor, and when a round is complete: here, a synchronous one."""

    def accepts(self, staleness: int) -> bool:
        """Whether an update that started `staleness` versions ago is accepted.

        In a synchronous round all have the same start.
        """
        return staleness == 0

    def scale(self, staleness: int) -> float:
        """Returns the factor of an update of this staleness. The divisor of the mean does not include it."""
        return 1.0

    def is_complete(self, updates: int, members: int) -> bool:
        """Whether the round ends before its deadline, because all members have answered."""
        return updates >= members


@dataclass(frozen=True)
class Algorithm:
    """Both parts of an algorithm. Server, agent and simulation share them."""

    device: DeviceAlgorithm = field(default_factory=DeviceAlgorithm)
    server: ServerAlgorithm = field(default_factory=ServerAlgorithm)


@dataclass(frozen=True)
class BufferedServerAlgorithm(ServerAlgorithm):
    """Accepts updates of any age and completes a round with K of them.

    An update that started s versions ago is multiplied by (1 + s)^-a, and the sum is divided by K, so a stale buffer
    moves the adapter less. The polynomial is FedAsync's (Xie et al., 2019); a = 1/2 is the value of FedBuff's authors.
    """

    buffer_size: int = 10  # K
    exponent: float = 0.5  # a

    def accepts(self, staleness: int) -> bool:
        """Accepts every update, regardless of its start."""
        return staleness >= 0

    def scale(self, staleness: int) -> float:
        """Returns (1 + s)^-a."""
        return float((1 + staleness) ** -self.exponent)

    def is_complete(self, updates: int, members: int) -> bool:
        """Whether the buffer holds K updates."""
        return updates >= self.buffer_size


def algorithm_of(settings: AlgorithmSettings) -> Algorithm:
    """Returns both parts of the algorithm that a cohort names."""
    server = ServerAlgorithm()
    if settings.name == "fedbuff":
        server = BufferedServerAlgorithm(buffer_size=settings.buffer_size, exponent=settings.staleness_exponent)
    return Algorithm(DeviceAlgorithm(settings.mu), server)
