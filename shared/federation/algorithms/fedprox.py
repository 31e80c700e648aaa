"""FedProx (Li et al., MLSys 2020): federated averaging whose devices also minimize mu/2 |B - B_start|^2.

Device half: between the steps, B is pulled back towards the round's start. The exact gradient of the proximal term is
known, so it needs no forward pass: a pull at rate lr mu, m times, is B <- B_start + (1 - lr mu)^m (B - B_start).
Server half: federated averaging's.
"""

from __future__ import annotations

from shared.cohort import AlgorithmSettings
from shared.federation.algorithms.base import Algorithm, DeviceHalf


def fedprox(settings: AlgorithmSettings) -> Algorithm:
    """Federated averaging of devices that are held near their start."""
    return Algorithm(DeviceHalf(settings.mu))
