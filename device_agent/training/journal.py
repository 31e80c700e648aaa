"""A run's directory: plan, trajectory and result. It survives kill -9 and power cuts.

run.json            the plan: everything the training process must know
trajectory.bin      the ledger (shared.zo.trajectory), synced after every step
figures.json        seconds and memory of the processes that worked on it so far
best.safetensors    B at the best validation, in a cohort's round after the last step; the file that is uploaded
last.safetensors    B after the last step, kept beside it
limits              how the run is to hold back from its next step on; the daemon writes it, the training reads it
start.safetensors   B that the run goes on from, if it goes on from an adapter
plan.bin            the plan and the data as the native runner takes them (`device_agent.training.plan`)
draws.npz           samples and noise of a private run; secret, and gone when it is done
prepared.json       counts of the native plan, and its sha256
checkpoints/        B and the optimizer's state after some steps, if the program has a `state`
unusable.log        which records of the data set do not fit the task, and why; it stays on the device
charge.json         the charge in the privacy ledger that pays for a private run
best.f32, last.f32  the same B's from the native runner, D little-endian float32 each
result.json         what is reported; once it exists, only the upload is missing
trainer.log         standard error of the training process
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from device_agent.durable import write_durably
from device_agent.training.checkpoints import CheckpointDirectory, Checkpoints
from device_agent.training.dp_sampling import DPSamples, load_or_draw
from shared.canonical import sha256_hex
from shared.errors import Untrusted
from shared.federation.algorithms import DeviceHalf, algorithm_of
from shared.federation.cohort import RoundTask
from shared.job import Result
from shared.privacy import ExamplePrivacy
from shared.program import ProgramManifest
from shared.recipe import Sha256
from shared.task import Task
from shared.training_settings import TrainingSettings
from shared.zo.lora import F32, adapter_file, load_adapter
from shared.zo.trajectory import Limits, TrajectoryFile, TrajectoryHeader

KEPT_RUNS = 10  # directories; the newest

Document = TypeVar("Document", bound=BaseModel)


class RunPlan(BaseModel):
    """What a run trains: job, task, settings, program files and data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_id: str
    task: Task
    training: TrainingSettings
    manifest: ProgramManifest
    dataset: Path
    program: Path
    weights: Path
    tokenizer: Path
    noise_key: Sha256 = Field(description="of the noise on counts of records (`count_noise`); stays on the device")
    start: Path | None = None
    start_sha256: Sha256 | None = None
    round: RoundTask | None = Field(None, description="of a cohort; null: the run is its user's own")

    privacy: ExamplePrivacy | None = None
    blank: bool = Field(False, description="no training record fits the task; steps leave B as it is")

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a 0-based step. A blank run's pulls follow the job's rate; they move nothing."""
        return 0.0 if self.blank else self.training.lr_at(step)

    @property
    def dynamic_length(self) -> bool:
        """Whether batches are padded only to their longest example. Private runs use the full length, so that one
        example cannot change the rounding of another.
        """
        return self.manifest.dynamic_length and self.privacy is None

    @property
    def half(self) -> DeviceHalf:
        """The device's half of the federated algorithm: the round's, or one with the job's own proximal term."""
        return DeviceHalf(self.training.proximal) if self.round is None else algorithm_of(self.round.algorithm).device

    @property
    def uploads_last(self) -> bool:
        """Whether B after the last step is uploaded instead of the best validated one.

        Federated averaging (McMahan et al., AISTATS 2017, Algorithm 1) uses the last one: selection on a few local
        examples would add noise. The test split is then not read. A private run may not select by its data either, and
        measures nothing.
        """
        return self.round is not None or self.privacy is not None

    @property
    def header(self) -> TrajectoryHeader:
        """The trajectory's header; a different header means a different run."""
        return TrajectoryHeader(
            job_id=self.job_id,
            job_seed=self.training.seed,
            recipe_id=self.manifest.recipe_id,
            noise=self.manifest.recipe.noise,
            queries=self.manifest.recipe.queries,
            size=self.manifest.size,
            start_sha256=self.start_sha256,
            proximal=self.half.mu if self.half.pulls else None,
            exact=self.manifest.recipe.estimator == "gradient",
        )

    def begin_b(self) -> F32:
        """Returns B (D,) before the first step. Raises Untrusted if the start file's hash differs from the plan's."""
        if self.start is None:
            return np.zeros(self.manifest.size, np.float32)
        data = self.start.read_bytes() if self.start.is_file() else b""
        if sha256_hex(data) != self.start_sha256:
            raise Untrusted(f"{self.start} is not the adapter that the run goes on from; remove it and it is fetched")
        return load_adapter(data, self.manifest.size)


class ResourceUsage(BaseModel):
    """Time and memory used by all processes of a run; a kill loses what was not yet recorded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train_seconds: float = Field(0, ge=0, description="of steps, with all that the loop does around the program")
    program_seconds: float = Field(0, ge=0, description="of these, inside the program")
    seconds: float = Field(0, ge=0)
    load_seconds: float = Field(0, ge=0, description="of the latest process: loading methods, with packing the weights")
    peak_rss_bytes: int = Field(0, ge=0)

    def plus(self, later: ResourceUsage) -> ResourceUsage:
        """Returns the sum with the usage of a later process."""
        return ResourceUsage(
            train_seconds=self.train_seconds + later.train_seconds,
            program_seconds=self.program_seconds + later.program_seconds,
            seconds=self.seconds + later.seconds,
            load_seconds=later.load_seconds,
            peak_rss_bytes=max(self.peak_rss_bytes, later.peak_rss_bytes),
        )


class ExampleCounts(BaseModel):
    """How many records a training split has, how many of them were cut to the recipe's sequence length, and how many
    do not fit the task. The latter two have noise (`count_noise`). answer_tokens: how many answer tokens each measured
    split has, where the task writes text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    records: int = Field(ge=0)
    truncated: int = Field(0, ge=0)
    unusable: int = Field(0, ge=0)
    answer_tokens: dict[str, int] | None = None


class PreparedData(BaseModel):
    """What the native runner's plan file contains, and its hash."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    examples: ExampleCounts = Field(description="of the training split")
    plan_sha256: Sha256


class RunDirectory:
    """The directory of one job's run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def best(self) -> Path:
        """The adapter that is uploaded: the best validated one, or the last if `RunPlan.uploads_last`."""
        return self.path / "best.safetensors"

    @property
    def last(self) -> Path:
        """The adapter after the last step."""
        return self.path / "last.safetensors"

    @property
    def start(self) -> Path:
        """The adapter that a warm-started run begins with."""
        return self.path / "start.safetensors"

    @property
    def log(self) -> Path:
        """Standard error of the training process."""
        return self.path / "trainer.log"

    @property
    def native_plan(self) -> Path:
        """The plan file for the native runner."""
        return self.path / "plan.bin"

    @property
    def dp_samples_file(self) -> Path:
        """File of a private run's samples and noise."""
        return self.path / "draws.npz"

    @property
    def charge(self) -> Path:
        """File that names the privacy charge of a private run."""
        return self.path / "charge.json"

    def record_unusable(self, lines: Sequence[str]) -> None:
        """Records which records were left out. No lines: none."""
        path = self.path / "unusable.log"
        if lines:
            write_durably(path, "\n".join(lines).encode(errors="replace") + b"\n")
        else:
            path.unlink(missing_ok=True)

    def unusable(self) -> str | None:
        """Returns the summary of the records that were left out, or None if there are none."""
        try:
            with (self.path / "unusable.log").open(encoding="utf-8") as file:
                return file.readline().strip()
        except FileNotFoundError:
            return None

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints of B and the optimizer's state, if the program has a `state`."""
        return CheckpointDirectory(self.path / "checkpoints")

    @property
    def ledger(self) -> Path:
        """The trajectory."""
        return self.path / "trajectory.bin"

    def limit(self, limits: Limits) -> None:
        """Sets the run's limits, effective from its next step: two lines of a name and a number, 0 for no limit."""
        text = f"rest {limits.rest:g}\nlength {limits.max_length or 0}\n"
        temporary = self.path / "limits.new"
        temporary.write_text(text)
        temporary.replace(self.path / "limits")

    def limits(self) -> Limits:
        """Returns the limits set last; none in a new run."""
        try:
            values = dict(line.split() for line in (self.path / "limits").read_text().splitlines())
        except FileNotFoundError:
            return Limits()
        return Limits(rest=float(values["rest"]), max_length=int(values["length"]) or None)

    def begin(self, plan: RunPlan) -> None:
        """Creates the directory if necessary and writes the plan, whose paths may have changed since a kill."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._write("run.json", plan)

    def plan(self) -> RunPlan:
        """Returns the plan written by `begin`."""
        return RunPlan.model_validate_json((self.path / "run.json").read_bytes())

    def prepared(self) -> PreparedData | None:
        """Returns the description of the native plan file, or None."""
        return self._read("prepared.json", PreparedData)

    def record_prepared(self, prepared: PreparedData) -> None:
        """Records that the native plan file is complete."""
        self._write("prepared.json", prepared)

    def figures(self) -> ResourceUsage:
        """Returns the recorded resource usage; zeros in a new run."""
        return self._read("figures.json", ResourceUsage) or ResourceUsage()

    def record_usage(self, figures: ResourceUsage) -> None:
        """Records the resource usage so far."""
        self._write("figures.json", figures)

    def result(self) -> Result | None:
        """Returns the result if training is complete."""
        return self._read("result.json", Result)

    def finish(self, result: Result) -> None:
        """Records the result, after both adapters were written, and deletes secret samples."""
        self._write("result.json", result)
        if self.dp_samples_file.exists():
            self.native_plan.unlink(missing_ok=True)
            self.dp_samples_file.unlink()

    def begin_b(self, plan: RunPlan) -> F32:
        """Returns B (D,) before the first step; see `RunPlan.begin_b`."""
        return plan.begin_b()

    def dp_samples(self, plan: RunPlan, examples: int) -> DPSamples:
        """Returns the samples and noise of a private run. Raises InvalidDataset, or ValueError for other runs."""
        if plan.privacy is None:
            raise ValueError("a run that is not private draws nothing in secret")
        return load_or_draw(
            self.dp_samples_file, plan.privacy, examples, plan.training.steps, plan.manifest.recipe.noised_scalars
        )

    def open_trajectory(self, plan: RunPlan) -> TrajectoryFile:
        """Opens or creates the trajectory. Raises Conflict if it belongs to another run."""
        return TrajectoryFile(self.ledger, plan.header)

    def write_adapter(self, path: Path, flat: F32, plan: RunPlan, step: int) -> None:
        """Writes B (D,) after `step` steps as an adapter file; equal runs write equal bytes."""
        write_durably(path, run_adapter(flat, plan, step))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run's exclusive lock; waits for an orphaned training process to finish its step."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Deletes the run."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self, name: str, document: BaseModel) -> None:
        write_durably(self.path / name, document.model_dump_json(indent=1).encode())

    def _read(self, name: str, model: type[Document]) -> Document | None:
        try:
            return model.model_validate_json((self.path / name).read_bytes())
        except FileNotFoundError:
            return None


def run_adapter(flat: F32, plan: RunPlan, step: int) -> bytes:
    """Returns B (D,) after `step` steps as the adapter file to upload."""
    manifest = plan.manifest
    return adapter_file(flat, job_id=plan.job_id, recipe_id=manifest.recipe_id, a_sha256=manifest.a_sha256, step=step)


def prune_runs(runs: Path, keep: int = KEPT_RUNS) -> None:
    """Deletes all but the newest `keep` run directories."""
    directories = sorted((path for path in runs.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in directories[: max(len(directories) - keep, 0)]:
        RunDirectory(path).remove()
