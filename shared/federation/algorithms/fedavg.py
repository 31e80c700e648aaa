"""FedAvg (McMahan et al., AISTATS 2017): all start from one version, each trains alone, the mean is the next version.

Device half: plain steps. Server half: one start for all; ends when all have answered, or at the deadline.
"""

from __future__ import annotations

from shared.cohort import AlgorithmSettings
from shared.federation.algorithms.base import Algorithm, DeviceHalf


def fedavg(settings: AlgorithmSettings) -> Algorithm:
    """Federated averaging; mu > 0 adds the pull of FedProx on the device."""
    return Algorithm(DeviceHalf(settings.mu))
