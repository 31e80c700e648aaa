"""Computes epsilon in a child process: `python -m device_agent.policy.privacy_accounting`.

The accountant needs 100 MB of memory with SciPy, which the child returns, and a hostile job may ask for a computation
that takes minutes, which a limit of processor time ends. The child reads an `_Order` from standard input and prints a
number.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from shared.federation.accounting import Spending, epsilon_of

MOST_SECONDS = 120  # of processor time
PACKAGES = Path(__file__).resolve().parents[2]


class AccountingFailed(Exception):
    """Epsilon could not be computed: dp-accounting is not installed, or the computation took too long."""


class _Order(BaseModel):
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
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    try:
        result = subprocess.run(
            [sys.executable, "-m", "device_agent.policy.privacy_accounting"],
            input=_Order(spendings=list(spendings), delta=delta).model_dump_json(),
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
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
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    order = _Order.model_validate_json(sys.stdin.read())
    sys.stdout.write(f"{epsilon_of(order.spendings, order.delta)!r}\n")


if __name__ == "__main__":
    main()
