"""The privacy ledger: what all runs on this device, of all users, have spent of each data set's privacy.

A run is charged durably before it trains (`privacy.json` in the agent's home). A charge pays for one run directory,
whose samples and noise are drawn once; a job whose run was removed is charged again. Nothing is ever given back.

Epsilon is computed in a child process (`shared.federation.accounting`), which gives the accountant's memory (100 MB
with SciPy) back when it ends. Its limits of processor time and memory end the computations of hostile jobs, which would
take minutes.
"""

from __future__ import annotations

import json
import math
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field

from device_agent.durable import read_document, write_document
from device_agent.errors import PolicyForbids, PrivacyLimitReached
from device_agent.policy.evaluator import OwnerConsent
from device_agent.training.run_directory import RunDirectory
from shared.federation.accounting import AccountingRequest, Spending
from shared.privacy import ExamplePrivacy
from shared.strict_model import StrictModel


def epsilon_in_child(spendings: Sequence[Spending], delta: float) -> float | None:
    """Returns epsilon at `delta` of all spendings together, 0 for none; see `epsilon_of`.

    None: it cannot be computed, because dp-accounting is not installed or the computation takes too long.
    """
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
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None
    return None if math.isnan(epsilon) else epsilon


class PrivacyCost(StrictModel):
    """What a run spends, and on which data. No spending: a run without privacy, whose cost has no bound."""

    job_id: str
    dataset: str
    directory: Path = Field(description="of the data set; other names of the same directory share its spending")
    spending: Spending | None


class Charge(PrivacyCost):
    """One entry of the ledger."""

    id: str = Field(default_factory=lambda: secrets.token_hex(16))
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))

    def pays(self, other: PrivacyCost) -> bool:
        """Returns whether this charge is for that spending."""
        return all(getattr(self, name) == getattr(other, name) for name in PrivacyCost.model_fields)


class DatasetSpending(StrictModel):
    """The privacy spent on one data set."""

    dataset: str
    epsilon: float | None = Field(description="of all private runs together; null: it cannot be computed here")
    delta: float
    limit: float | None = Field(description="epsilon that may be spent; null: no limit")
    runs: int = Field(description="number of private runs")
    unprotected: int = Field(description="number of runs without privacy, which epsilon does not cover")

    def line(self) -> str:
        """Formats the spending as one line for people."""
        epsilon_text = "unknown (pip install 'mobizo[privacy]')" if self.epsilon is None else f"{self.epsilon:.3g}"
        limit = "no limit" if self.limit is None else f"limit {self.limit:g}"
        line = f"privacy of data set {self.dataset}: epsilon {epsilon_text} ({limit}) at delta {self.delta:g}"
        line += f", {self.runs} private runs"
        return f"{line}, {self.unprotected} runs without privacy" if self.unprotected else line


class _File(StrictModel):
    charges: list[Charge] = Field([])


def spending_of(privacy: ExamplePrivacy | None, steps: int) -> Spending | None:
    """Returns what a run of this many steps spends; None without privacy."""
    if privacy is None:
        return None
    return Spending(sampling_rate=privacy.sampling_rate, noise_multiplier=privacy.sigma, times=steps)


class PrivacyLedger:
    """The ledger in one file. Only the daemon, which holds the home's lock, writes it."""

    def __init__(self, path: Path, consents: OwnerConsent, datasets: Mapping[str, Path] | None = None) -> None:
        """datasets: directory of each data set by name. The strictest limit of a directory's names holds for all."""
        self._path, self._consents, self._datasets = path, consents, datasets or {}

    def check(self, cost: PrivacyCost, run: RunDirectory) -> None:
        """Raises PrivacyLimitReached if a run may not begin, PolicyForbids if the ledger is damaged.

        A run that is already paid for may always continue.
        """
        limit = self._limit(cost)
        charges = self.charges()
        if limit is None or _paid(cost, run, charges):
            return
        allowed = f"the owner of this device limits the privacy of data set {cost.dataset!r} to epsilon {limit:g}"
        if cost.spending is None:
            raise PrivacyLimitReached(f"{allowed}; a job without `privacy` has no bound: submit it with `privacy`")
        spendings = [charge.spending for charge in _charges_of(charges, cost.dataset, {cost.directory})]
        total_epsilon = epsilon_in_child([*filter(None, spendings), cost.spending], self._consents.privacy_delta)
        if total_epsilon is None:
            raise PrivacyLimitReached(f"{allowed}, and the cost of this run cannot be computed; use fewer steps")
        if total_epsilon > limit:
            raise PrivacyLimitReached(
                f"{allowed} at delta {self._consents.privacy_delta:g}, which this run would exceed: request a smaller "
                "epsilon or fewer steps, or ask the owner to raise `privacy_limit`"
            )

    def _limit(self, cost: PrivacyCost) -> float | None:
        names = {cost.dataset, *(name for name, path in self._datasets.items() if path == cost.directory)}
        return min(
            (limit for name in names if (limit := self._consents.privacy_limit_of(name)) is not None), default=None
        )

    def charge(self, cost: PrivacyCost, run: RunDirectory) -> None:
        """Charges a run durably, once. A kill between the two writes charges it twice, never less than once."""
        charges = self.charges()
        if _paid(cost, run, charges):
            return
        charge = Charge(**cost.model_dump())
        write_document(self._path, _File(charges=[*charges, charge]))
        write_document(run.charge, charge)

    def charges(self) -> list[Charge]:
        """Returns all charges, oldest first. Raises PolicyForbids if the file is damaged."""
        damaged = PolicyForbids(
            f"the privacy ledger {self._path} cannot be read; restore it from a backup; without it this device does "
            "not know what was spent, and trains nothing"
        )
        return (read_document(self._path, _File, damaged) or _File()).charges

    def summary(self) -> list[DatasetSpending]:
        """Returns what was spent on each data set, by name. Raises PolicyForbids if the file is damaged."""
        charges = self.charges()
        limits = self._consents.privacy_limit
        limited = limits if isinstance(limits, dict) else {}
        names = sorted({charge.dataset for charge in charges} | set(limited))
        return [self._summary(name, charges) for name in names]

    def _summary(self, dataset: str, charges: Sequence[Charge]) -> DatasetSpending:
        directories = {charge.directory for charge in charges if charge.dataset == dataset}
        own = _charges_of(charges, dataset, directories)
        spendings = [charge.spending for charge in own if charge.spending is not None]
        return DatasetSpending(
            dataset=dataset,
            epsilon=epsilon_in_child(spendings, self._consents.privacy_delta),
            delta=self._consents.privacy_delta,
            limit=self._consents.privacy_limit_of(dataset),
            runs=len(spendings),
            unprotected=len(own) - len(spendings),
        )


def _charges_of(charges: Sequence[Charge], dataset: str, directories: set[Path]) -> list[Charge]:
    return [charge for charge in charges if charge.dataset == dataset or charge.directory in directories]


def _paid(cost: PrivacyCost, run: RunDirectory, charges: Sequence[Charge]) -> bool:
    recorded = read_document(run.charge, Charge)
    if recorded is None or not recorded.pays(cost):
        return False
    return any(charge.id == recorded.id and charge.pays(cost) for charge in charges)
