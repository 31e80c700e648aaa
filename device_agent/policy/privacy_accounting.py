"""Computes epsilon in a child process (`shared.federation.accounting`).

A child process gives the accountant's memory (100 MB with SciPy) back when it ends. Its limits of processor time and
memory end the computations of hostile jobs, which would take minutes.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from shared.federation.accounting import AccountingRequest, Spending


class AccountingFailed(Exception):
    """Epsilon could not be computed: dp-accounting is not installed, or the computation took too long."""


def can_account() -> bool:
    """Returns whether dp-accounting is installed."""
    return find_spec("dp_accounting") is not None


def epsilon_in_child(spendings: Sequence[Spending], delta: float) -> float:
    """Returns epsilon at `delta` of all spendings together, 0 for none; see `epsilon_of`. Raises AccountingFailed."""
    if not spendings:
        return 0.0
    try:
        result = subprocess.run(
            [sys.executable, "-m", "shared.federation.accounting"],
            input=AccountingRequest(spendings=tuple(spendings), delta=delta).model_dump_json(),
            capture_output=True,
            text=True,
            check=True,
        )
        epsilon = float(json.loads(result.stdout)["answer"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise AccountingFailed from error
    if math.isnan(epsilon):
        raise AccountingFailed
    return epsilon
