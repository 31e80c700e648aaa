"""The algorithms of federation by name; each is a device half and a server half in a small file of its own."""

from __future__ import annotations

from collections.abc import Callable

from shared.cohort import AlgorithmName, AlgorithmSettings
from shared.federation.algorithms.base import Algorithm, DeviceHalf, ServerHalf
from shared.federation.algorithms.fedavg import fedavg
from shared.federation.algorithms.fedbuff import fedbuff
from shared.federation.algorithms.fedprox import fedprox

__all__ = ["ALGORITHMS", "Algorithm", "DeviceHalf", "ServerHalf", "find"]

ALGORITHMS: dict[AlgorithmName, Callable[[AlgorithmSettings], Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedbuff": fedbuff,
}


def find(settings: AlgorithmSettings) -> Algorithm:
    """Both halves of the algorithm that a cohort names."""
    return ALGORITHMS[settings.name](settings)
