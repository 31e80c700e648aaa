"""Noise on counts of records, so that no single record decides what a job without privacy tells of them.

Laplace noise of scale 1 / EPSILON hides whether a given record was counted: an observer who knows all other records
learns at most EPSILON about it (Dwork et al., TCC 2006). The noise is a function (HMAC-SHA256) of a
secret of the device and of what is counted. Asking again therefore gives the same answer, and repeated jobs cannot
average the noise away.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from dataclasses import dataclass
from typing import Any

from shared.canonical import canonical_json

EPSILON = 0.1  # that each count may tell of one record
SCALE = 1 / EPSILON  # records


@dataclass(frozen=True)
class CountNoise:
    """The noise of one device on one task's counts. key: of `AgentHome.noise_key`.

    task: the task as JSON.
    """

    key: str
    task: Any

    def on(self, count: int, purpose: str, *of: Any) -> int:
        """Returns the count of records plus its noise, rounded; it may be negative.

        of: everything in addition to the task that the count depends on (JSON types), such as the file's sha256. Two
        different counts must not share their noise: their difference would then be exact.
        """
        message = canonical_json([purpose, self.task, *of])
        digest = hmac.new(bytes.fromhex(self.key), message, hashlib.sha256).digest()
        centred = (int.from_bytes(digest[:8]) + 0.5) / 2**64 - 0.5  # uniform, in (-0.5, 0.5)
        return count + round(-math.copysign(SCALE, centred) * math.log1p(-2 * min(abs(centred), 0.5 - 2**-53)))
