"""Computes epsilon in a child process: `python -m device_agent.policy.privacy_accounting`.

A child process gives the accountant's memory (100 MB with SciPy) back when it ends. A limit of processor time ends the
computations of hostile jobs, which would take minutes. The child reads an `AccountingRequest` from standard input and
prints a number.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from pydantic import BaseModel, ConfigDict

from shared.federation.accounting import Spending, epsilon_of

MAX_SECONDS = 120  # of processor time


class AccountingFailed(Exception):
    """Epsilon could not be computed: dp-accounting is not installed, or the computation took too long."""


class AccountingRequest(BaseModel):
    """All spendings of a data set, and the delta at which epsilon is computed."""

    model_config = ConfigDict(extra="forbid")

    spendings: list[Spending]
    delta: float


def can_account() -> bool:
    """Returns whether dp-accounting is installed."""
    return find_spec("dp_accounting") is not None


def epsilon_in_child(spendings: Sequence[Spending], delta: float) -> float:
    """Returns epsilon at `delta` of all spendings together, 0 for none; see `epsilon_of`. Raises AccountingFailed."""
    if not spendings:
        return 0.0
    try:
        result = subprocess.run(
            [sys.executable, "-m", "device_agent.policy.privacy_accounting"],
            input=AccountingRequest(spendings=list(spendings), delta=delta).model_dump_json(),
            capture_output=True,
            text=True,
            check=True,
        )
        epsilon = float(result.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise AccountingFailed from error
    if math.isnan(epsilon):
        raise AccountingFailed
    return epsilon


def main() -> None:
    """Entry point."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    request = AccountingRequest.model_validate_json(sys.stdin.read())
    sys.stdout.write(f"{epsilon_of(request.spendings, request.delta)!r}\n")


if __name__ == "__main__":
    main()
