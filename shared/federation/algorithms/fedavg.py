"""FedAvg (McMahan et al., AISTATS 2017): all devices start from one version; the mean update gives the next one.

Device half: plain steps. Server half: a round ends when all members have answered, or at the deadline.
"""

from __future__ import annotations

from shared.federation.algorithms.base import Algorithm, DeviceHalf
from shared.federation.cohort import AlgorithmSettings


def fedavg(settings: AlgorithmSettings) -> Algorithm:
    """Returns federated averaging; mu > 0 adds FedProx's proximal term on the device."""
    return Algorithm(DeviceHalf(settings.mu))
