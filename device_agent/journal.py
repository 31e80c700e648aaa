"""A run's directory on disk: what to train, the trajectory so far, and what came out. Survives kill -9.

    run.json            the plan: everything the training process must know
    trajectory.bin      the ledger (shared.trajectory), synced after every step
    figures.json        seconds and memory of the processes that worked on it so far
    best.safetensors    B at the best validation, in a cohort's round after the last step; the file that is uploaded
    last.safetensors    B after the last step, kept beside it
    limits              how the run is to hold back from its next step on; the daemon writes it, the training reads it
    start.safetensors   B that the run goes on from, if it goes on from an adapter
    plan.bin            the plan and the data as the native runner takes them (`device_agent.plan`)
    draws.npz           samples and noise of a private run; secret, and gone when it is done
    prepared.json       what the native plan was made of, and its sha256
    best.f32, last.f32  the same B's from the native runner, D little-endian float32 each
    result.json         what is reported; once it exists, only the upload is missing
    trainer.log         standard error of the training process

Knows no runtime and no HTTP.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from device_agent.draws import Draws, kept_draws
from device_agent.durable import write_durably
from shared.canonical import sha256_hex
from shared.cohort import RoundTask
from shared.errors import Untrusted
from shared.federation.algorithms import DeviceHalf, find
from shared.job import Result, TrainingSettings
from shared.lora import F32, adapter_file, load_adapter
from shared.privacy import ExamplePrivacy
from shared.program import ProgramManifest
from shared.recipe import Sha256
from shared.task import Task
from shared.trajectory import Limits, TrajectoryFile, TrajectoryHeader

KEPT_RUNS = 10  # directories; the newest

Document = TypeVar("Document", bound=BaseModel)


class RunPlan(BaseModel):
    """What one run trains, on what, with which files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_id: str
    task: Task
    training: TrainingSettings
    manifest: ProgramManifest
    dataset: Path
    program: Path
    weights: Path
    tokenizer: Path
    start: Path | None = None
    start_sha256: Sha256 | None = None
    round: RoundTask | None = Field(None, description="of a cohort; null: the run is its user's own")

    privacy: ExamplePrivacy | None = None

    @property
    def dynamic_length(self) -> bool:
        """Whether batches are as short as their examples; if not all alike, one would change the others' rounding."""
        return self.manifest.dynamic_length and self.privacy is None

    @property
    def half(self) -> DeviceHalf:
        """What the run does beside the plain steps: what its round's algorithm says, or a pull of its own."""
        return DeviceHalf(self.training.proximal) if self.round is None else find(self.round.algorithm).device

    @property
    def hands_in_last(self) -> bool:
        """Whether B after the last step is handed in, as federated averaging takes it, and not the best validated one.

        McMahan et al., AISTATS 2017, Algorithm 1. Each device choosing by its own few examples would weigh steps by
        luck. No test split is read then: what a round is judged by is validation, before and after. A private run
        may not let its data choose either, and measures nothing.
        """
        return self.round is not None or self.privacy is not None

    @property
    def header(self) -> TrajectoryHeader:
        """The trajectory's header: a run whose header differs is another run."""
        return TrajectoryHeader(
            job_id=self.job_id,
            job_seed=self.training.seed,
            recipe_id=self.manifest.recipe_id,
            noise=self.manifest.recipe.noise,
            queries=self.manifest.recipe.queries,
            size=self.manifest.size,
            start_sha256=self.start_sha256,
            proximal=self.half.mu if self.half.pulls else None,
        )

    def begin_b(self) -> F32:
        """B (D,) before the first step. Raises Untrusted if the start's file is not the one that the plan names."""
        if self.start is None:
            return np.zeros(self.manifest.size, np.float32)
        data = self.start.read_bytes() if self.start.is_file() else b""
        if sha256_hex(data) != self.start_sha256:
            raise Untrusted(f"{self.start} is not the adapter that the run goes on from; remove it and it is fetched")
        return load_adapter(data, self.manifest.size)


class Figures(BaseModel):
    """Time and memory spent on a run, over all its processes; a kill loses what was not yet noted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train_seconds: float = Field(0, ge=0, description="of steps, with all that the loop does around the program")
    program_seconds: float = Field(0, ge=0, description="of these, inside the program")
    seconds: float = Field(0, ge=0)
    peak_rss_bytes: int = Field(0, ge=0)

    def plus(self, later: Figures) -> Figures:
        """These and those of a process that worked on the run after."""
        return Figures(
            train_seconds=self.train_seconds + later.train_seconds,
            program_seconds=self.program_seconds + later.program_seconds,
            seconds=self.seconds + later.seconds,
            peak_rss_bytes=max(self.peak_rss_bytes, later.peak_rss_bytes),
        )


class Prepared(BaseModel):
    """What the native plan was made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train_examples: int = Field(ge=1)
    truncated_examples: int = Field(ge=0)
    plan_sha256: Sha256


class RunDirectory:
    """The directory of one job's run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def best(self) -> Path:
        """The adapter that is uploaded: the best validated one, or the last where `RunPlan.hands_in_last`."""
        return self.path / "best.safetensors"

    @property
    def last(self) -> Path:
        """The adapter after the last step."""
        return self.path / "last.safetensors"

    @property
    def start(self) -> Path:
        """The adapter that the run goes on from, if it goes on from one."""
        return self.path / "start.safetensors"

    @property
    def log(self) -> Path:
        """Standard error of the training process."""
        return self.path / "trainer.log"

    @property
    def native_plan(self) -> Path:
        """What the native runner trains by."""
        return self.path / "plan.bin"

    @property
    def kept_draws(self) -> Path:
        """What a private run has drawn."""
        return self.path / "draws.npz"

    @property
    def ledger(self) -> Path:
        """The trajectory."""
        return self.path / "trajectory.bin"

    def limit(self, limits: Limits) -> None:
        """Has the training hold back from its next step on: two lines of a word and a number, which are 0 for none."""
        text = f"rest {limits.rest:g}\nlength {limits.max_length or 0}\n"
        aside = self.path / "limits.new"
        aside.write_text(text)
        aside.replace(self.path / "limits")

    def limits(self) -> Limits:
        """What `limit` said last; no limits in a new run."""
        try:
            words = dict(line.split() for line in (self.path / "limits").read_text().splitlines())
        except FileNotFoundError:
            return Limits()
        return Limits(rest=float(words["rest"]), max_length=int(words["length"]) or None)

    def begin(self, plan: RunPlan) -> None:
        """Makes the directory, or finds it, and notes the plan (paths may have changed since a kill)."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._write("run.json", plan)

    def plan(self) -> RunPlan:
        """The plan noted by `begin`."""
        return RunPlan.model_validate_json((self.path / "run.json").read_bytes())

    def prepared(self) -> Prepared | None:
        """What the native plan was made of, if it was made."""
        return self._read("prepared.json", Prepared)

    def note_prepared(self, prepared: Prepared) -> None:
        """Notes that the native plan is there."""
        self._write("prepared.json", prepared)

    def figures(self) -> Figures:
        """What was noted last; zeros in a new run."""
        return self._read("figures.json", Figures) or Figures()

    def note(self, figures: Figures) -> None:
        """Notes time and memory spent so far."""
        self._write("figures.json", figures)

    def result(self) -> Result | None:
        """The result, if training is complete."""
        return self._read("result.json", Result)

    def finish(self, result: Result) -> None:
        """Notes that training is complete; both adapters must have been written. What was secret goes."""
        self._write("result.json", result)
        if self.kept_draws.exists():
            self.native_plan.unlink(missing_ok=True)
            self.kept_draws.unlink()

    def begin_b(self, plan: RunPlan) -> F32:
        """B (D,) before the first step; see `RunPlan.begin_b`."""
        return plan.begin_b()

    def draws(self, plan: RunPlan, examples: int) -> Draws:
        """What a private run on so many examples draws, once. Raises ChangedData, InvalidDataset, or ValueError."""
        if plan.privacy is None:
            raise ValueError("a run that is not private draws nothing in secret")
        steps, queries = plan.training.steps, plan.manifest.recipe.queries
        return kept_draws(self.kept_draws, plan.privacy, examples, steps, queries)

    def open_trajectory(self, plan: RunPlan) -> TrajectoryFile:
        """The ledger, continued or begun. Raises Conflict if it is another run's."""
        return TrajectoryFile(self.ledger, plan.header)

    def write_adapter(self, path: Path, flat: F32, plan: RunPlan, step: int) -> None:
        """B (D,) after `step` steps as an adapter file; equal runs write equal bytes."""
        write_durably(path, run_adapter(flat, plan, step))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run for one training process; waits while an orphan of a killed daemon finishes its step."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Forgets the run."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self, name: str, document: BaseModel) -> None:
        write_durably(self.path / name, document.model_dump_json(indent=1).encode())

    def _read(self, name: str, model: type[Document]) -> Document | None:
        try:
            return model.model_validate_json((self.path / name).read_bytes())
        except FileNotFoundError:
            return None


def run_adapter(flat: F32, plan: RunPlan, step: int) -> bytes:
    """B (D,) after `step` steps of a run as the adapter file that is uploaded."""
    manifest = plan.manifest
    return adapter_file(flat, job_id=plan.job_id, recipe_id=manifest.recipe_id, a_sha256=manifest.a_sha256, step=step)


def prune_runs(runs: Path, keep: int = KEPT_RUNS) -> None:
    """Removes all but the newest `keep` run directories."""
    found = sorted((path for path in runs.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in found[: max(len(found) - keep, 0)]:
        RunDirectory(path).remove()
