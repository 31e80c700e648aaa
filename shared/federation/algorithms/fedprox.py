"""FedProx (Li et al., MLSys 2020): federated averaging whose devices also minimize mu/2 |B - B_start|^2.

Device half: between the steps, B is pulled towards the round's start. The gradient of the proximal term is known and
needs no forward pass: m pulls at rate lr mu are B <- B_start + (1 - lr mu)^m (B - B_start).
Server half: federated averaging's.
"""

from __future__ import annotations

from shared.federation.algorithms.base import Algorithm, DeviceHalf
from shared.federation.cohort import AlgorithmSettings


def fedprox(settings: AlgorithmSettings) -> Algorithm:
    """Returns federated averaging with a proximal term on the device."""
    return Algorithm(DeviceHalf(settings.mu))
