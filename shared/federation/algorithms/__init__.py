"""The federated algorithms by name. Each has a device half and a server half."""

from __future__ import annotations

from collections.abc import Callable

from shared.federation.algorithms.base import Algorithm, DeviceHalf, ServerHalf
from shared.federation.algorithms.fedavg import fedavg
from shared.federation.algorithms.fedbuff import fedbuff
from shared.federation.algorithms.fedprox import fedprox
from shared.federation.cohort import AlgorithmName, AlgorithmSettings

__all__ = ["ALGORITHMS", "Algorithm", "DeviceHalf", "ServerHalf", "find"]

ALGORITHMS: dict[AlgorithmName, Callable[[AlgorithmSettings], Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedbuff": fedbuff,
}


def find(settings: AlgorithmSettings) -> Algorithm:
    """Returns both halves of the algorithm that a cohort names."""
    return ALGORITHMS[settings.name](settings)
