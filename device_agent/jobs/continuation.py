"""What a job takes over from earlier runs of this device, and what it leaves for later ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from device_agent.datasets.store import AvailableDatasets, HeldDataset
from device_agent.errors import OwnerRefuses, TooFewNewRecords
from device_agent.policy.privacy_ledger import PrivacyCost, PrivacyLedger
from device_agent.policy.task_approvals import TaskApprovals
from device_agent.training.rehearsal import TrainingHistory, count_new_records, prepare_rehearsal
from device_agent.training.run_directory import RunDirectory
from shared.canonical import file_sha256
from shared.protocol import Lease
from shared.registry import AdapterManifest


@dataclass(frozen=True)
class Continuation:
    """The records of earlier runs, for one leased job. trained: the directory of the training history."""

    lease: Lease
    run: RunDirectory
    dataset: HeldDataset
    trained: Path
    datasets: AvailableDatasets
    tasks: TaskApprovals
    privacy: PrivacyLedger

    def check_new_records(self, start: AdapterManifest) -> None:
        """Raises TooFewNewRecords if a job that repeats would train too little that its start has not seen.

        The number that the server asked for is all that it learns. A private job trains whatever is new: what an
        earlier one trained is not recorded.
        """
        request = self.lease.job.request
        if request.repeat is None or request.privacy is not None or self.run.trajectory.exists():
            return
        history = TrainingHistory(self.trained).behind(start.sha256)
        if count_new_records(history, self.dataset) < request.repeat.min_new_records:
            raise TooFewNewRecords(
                f"data set {self.dataset.name!r} has fewer than {request.repeat.min_new_records} records since the "
                f"job's start"
            )

    def earlier_records(self, start: AdapterManifest) -> dict[str, int]:
        """Returns the run's `earlier`, as it was at first, after preparing its rehearsal.

        Private runs, whose accounting covers one data set, and runs of rounds rehearse nothing, nor do runs that start
        from another user's adapter.
        """
        request = self.lease.job.request
        if start.user != request.user or request.training.rehearsal == 0:
            return {}
        if request.privacy is not None or self.lease.round is not None:
            return {}
        if (plan := self.run.begun_plan()) is not None:
            return plan.earlier
        history = TrainingHistory(self.trained).behind(start.sha256)
        return prepare_rehearsal(self.run, history, self.lease.job.task, self.dataset, self.datasets, self._may_read)

    def _may_read(self, dataset: HeldDataset) -> bool:
        """Returns whether the owner lets this job read another data set."""
        job = self.lease.job
        cost = PrivacyCost(job_id=job.id, dataset=dataset.name, directory=dataset.directory, spending=None)
        try:
            self.tasks.check(job.task, dataset.name)
            self.privacy.check(cost, self.run)
        except OwnerRefuses:
            return False
        return True

    def record(self) -> None:
        """Records what the trained adapter has learned from, for rehearsal by later jobs."""
        plan = self.run.plan()
        if plan.privacy is None and plan.round is None and plan.dataset.is_dir():
            TrainingHistory(self.trained).record(
                file_sha256(self.run.best), plan.start_sha256, self.dataset.name, plan.task, plan.dataset
            )
