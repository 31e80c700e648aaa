"""Data types and minimum length of the inputs of programs (see shared.program)."""

from __future__ import annotations

import numpy as np

TOKEN_DTYPE = np.int64
SEED_DTYPE = np.int32

MIN_LENGTH = 2  # tokens of the shortest sequence that a program with dynamic length accepts
