"""Types and least length of what programs take (see shared.program), for those who make their inputs."""

from __future__ import annotations

import numpy as np

TOKEN_DTYPE = np.int64
SEED_DTYPE = np.int32

MIN_LENGTH = 2  # tokens of the shortest sequence that a program of dynamic length takes
