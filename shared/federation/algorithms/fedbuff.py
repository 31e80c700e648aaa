"""FedBuff (Nguyen et al., AISTATS 2022): asynchronous; every K updates make a version, whatever they started from.

Device half: federated averaging's; an update is the difference to its own start. Server half: an update that started s
versions ago is multiplied by (1 + s)^-a, and the sum is divided by K, so a stale buffer moves the adapter less. The
polynomial is FedAsync's (Xie et al., 2019); a = 1/2 is the value used by FedBuff's authors.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.federation.algorithms.base import Algorithm, DeviceHalf, ServerHalf
from shared.federation.cohort import AlgorithmSettings


@dataclass(frozen=True)
class BufferedServerHalf(ServerHalf):
    """Accepts updates of any age and completes a round with K of them."""

    buffer_size: int = 10  # K
    exponent: float = 0.5  # a

    def accepts(self, staleness: int) -> bool:
        """Accepts every update, regardless of its start."""
        return staleness >= 0

    def scale(self, staleness: int) -> float:
        """Returns (1 + s)^-a."""
        return float((1 + staleness) ** -self.exponent)

    def full(self, updates: int, asked: int) -> bool:
        """Whether the buffer holds K updates."""
        return updates >= self.buffer_size


def fedbuff(settings: AlgorithmSettings) -> Algorithm:
    """Returns asynchronous averaging with a buffer."""
    server = BufferedServerHalf(buffer_size=settings.buffer_size, exponent=settings.staleness_exponent)
    return Algorithm(DeviceHalf(settings.mu), server)
