"""Rehearsal: a run that continues an adapter draws some of its examples from the records that earlier runs trained.

    trained/SHA256.json          in the agent's home: what this device trained to make the adapter file of that sha256
    runs/JOB/rehearsed.jsonl     a sample of the training records of other data sets
    runs/JOB/held_out.jsonl      a sample of the held-out records of other data sets

Records stay in the owner's data sets: of each file its size and hash are kept. A file that has grown since still begins
with the bytes that were trained; of one that was replaced or removed, nothing is rehearsed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from device_agent.datasets.splits import SPLITS
from device_agent.datasets.store import AvailableDatasets, DatasetRemoved, HeldDataset
from device_agent.durable import read_document, write_document
from device_agent.errors import OwnerRefuses, TooFewNewRecords
from device_agent.policy.privacy_ledger import PrivacyCost
from device_agent.training.data import sample
from device_agent.training.run_directory import RunDirectory
from shared.canonical import file_sha256, sha256_hex
from shared.durable import write_pieces
from shared.errors import MobizoError
from shared.protocol import Lease
from shared.recipe import Sha256
from shared.registry import AdapterManifest
from shared.strict_model import StrictModel
from shared.task import Task

if TYPE_CHECKING:
    from device_agent.jobs.leased_job import AgentContext

KEPT_FILES = 100  # in `trained`; the newest
MAX_REHEARSED, MAX_HELD_OUT = 2_000, 200  # records of other data sets in one run


class FileStart(StrictModel):
    """The first `size` bytes of a file, and their sha256."""

    size: int = Field(ge=0)
    sha256: Sha256

    def records(self, path: Path) -> list[bytes]:
        """Returns the lines that are not blank; none if the file does not begin with these bytes."""
        try:
            with path.open("rb") as file:
                content = file.read(self.size)
        except FileNotFoundError:
            return []
        return _lines(content) if sha256_hex(content) == self.sha256 else []


def _lines(content: bytes) -> list[bytes]:
    return [line for line in content.split(b"\n") if line.strip()]


class TrainedDataset(StrictModel):
    """A data set that a run trained with a task. files: of each split."""

    dataset: str
    task: Task
    files: dict[str, FileStart]

    def records(self, directory: Path) -> dict[str, list[bytes]]:
        """Returns the records of each split that a version of the data set still has."""
        return {split: start.records(directory / f"{split}.jsonl") for split, start in self.files.items()}


class _TrainedDatasets(BaseModel):
    datasets: tuple[TrainedDataset, ...]


class TrainingHistory:
    """Which data sets this device trained to make each adapter file, in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def behind(self, adapter_sha256: str) -> tuple[TrainedDataset, ...]:
        """Returns the data sets behind an adapter file; none for a file that other devices made."""
        path = self._directory / f"{adapter_sha256}.json"
        damaged = MobizoError(f"{path} cannot be read; remove it, and the job rehearses nothing")
        read = read_document(path, _TrainedDatasets, damaged)
        return () if read is None else read.datasets

    def record(self, adapter_sha256: str, start_sha256: str | None, dataset: str, task: Task, directory: Path) -> None:
        """Records the data set that a run has trained, in a version's directory, after those behind its start.

        Once for each file: a finished run that is uploaded again needs no disk.
        """
        path = self._directory / f"{adapter_sha256}.json"
        if path.exists():
            return
        files = {
            split: FileStart(size=file.stat().st_size, sha256=file_sha256(file))
            for split in SPLITS
            if (file := directory / f"{split}.jsonl").is_file()
        }
        before = () if start_sha256 is None else self.behind(start_sha256)
        others = [each for each in before if (each.dataset, each.task) != (dataset, task)]
        trained = (*others, TrainedDataset(dataset=dataset, task=task, files=files))
        self._directory.mkdir(exist_ok=True, mode=0o700)
        write_document(path, _TrainedDatasets(datasets=trained))
        for old in sorted(self._directory.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-KEPT_FILES]:
            old.unlink()


def count_new_records(history: Sequence[TrainedDataset], dataset: HeldDataset) -> int:
    """Returns how many records of a data set, in all splits, are not known from `history`."""
    paths = [path for split in SPLITS if (path := dataset.directory / f"{split}.jsonl").is_file()]
    records = sum(len(_lines(path.read_bytes())) for path in paths)
    known = [each.records(dataset.directory).values() for each in history if each.dataset == dataset.name]
    return records - max((sum(map(len, splits)) for splits in known), default=0)


def prepare_rehearsal(
    run: RunDirectory,
    history: Sequence[TrainedDataset],
    task: Task,
    dataset: HeldDataset,
    datasets: AvailableDatasets,
    may_read: Callable[[HeldDataset], bool],
) -> dict[str, int]:
    """Copies a sample of other data sets' records to a run's directory. Returns how many records at the beginning of
    each split of the run's own data set earlier runs had.

    Only what was trained with the same task is rehearsed. may_read: whether the owner lets this job read a data set.
    """
    own: dict[str, int] = {}
    rehearsed: list[bytes] = []
    held_out: list[bytes] = []
    for trained in history:
        if trained.task != task:
            continue
        if trained.dataset == dataset.name:
            own = {split: len(records) for split, records in trained.records(dataset.directory).items()}
            continue
        with suppress(DatasetRemoved), datasets.hold(trained.dataset) as other:
            if may_read(other):
                records = trained.records(other.directory)
                rehearsed += records["train"]
                held_out += records.get("test") or records.get("validation", [])
    run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path, lines, limit in ((run.rehearsed, rehearsed, MAX_REHEARSED), (run.held_out, held_out, MAX_HELD_OUT)):
        write_pieces(path, [line + b"\n" for line in sample(lines, limit)])
    return own


@dataclass(frozen=True)
class Continuation:
    """What one leased job takes over from earlier runs of this device, and what it leaves for later ones."""

    lease: Lease
    run: RunDirectory
    dataset: HeldDataset
    context: AgentContext

    @property
    def _history(self) -> TrainingHistory:
        return TrainingHistory(self.context.home.trained)

    def check_new_records(self, start: AdapterManifest) -> None:
        """Raises TooFewNewRecords if a job that repeats would train too little that its start has not seen.

        The number that the server asked for is all that it learns. A private job trains whatever is new: what an
        earlier one trained is not recorded.
        """
        request = self.lease.job.request
        if request.repeat is None or request.privacy is not None or self.run.trajectory.exists():
            return
        history = self._history.behind(start.sha256)
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
        history, datasets = self._history.behind(start.sha256), self.context.datasets
        return prepare_rehearsal(self.run, history, self.lease.job.task, self.dataset, datasets, self._may_read)

    def _may_read(self, dataset: HeldDataset) -> bool:
        """Returns whether the owner lets this job read another data set."""
        job = self.lease.job
        cost = PrivacyCost(job_id=job.id, dataset=dataset.name, directory=dataset.directory, spending=None)
        try:
            self.context.tasks.check(job.task, dataset.name)
            self.context.privacy.check(cost, self.run)
        except OwnerRefuses:
            return False
        return True

    def record(self) -> None:
        """Records what the trained adapter has learned from, for rehearsal by later jobs."""
        plan = self.run.plan()
        if plan.privacy is None and plan.round is None and plan.dataset.is_dir():
            self._history.record(
                file_sha256(self.run.best), plan.start_sha256, self.dataset.name, plan.task, plan.dataset
            )
