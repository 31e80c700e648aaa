"""A run's directory, which survives kill -9 and power cuts.

run.json            the plan: what the run trains
trajectory.bin      the trajectory (shared.zo.trajectory), synced after every step
figures.json        seconds and memory of the processes that worked on it so far
best.safetensors    B at the best validation, in a cohort's round after the last step; the file that is uploaded
last.safetensors    B after the last step, kept beside it
start.safetensors   the initial B of a warm start
candidates/         B of the versions among which the device chooses a start; removed after the choice
rehearsed.jsonl     training records of other data sets (`rehearsal`); removed when the run has its result
held_out.jsonl      held-out records of other data sets; removed when the run has its result
draws.npz           samples and noise of a private run; secret, removed when the run has its result
checkpoints/        B and the optimizer's state after some steps, if the program has a `state`
references.json     log-probabilities of a preference run's answers at its start; it stays on the device
unusable.log        which records of the data set do not fit the task, and why; it stays on the device
charge.json         the charge in the privacy ledger that pays for a private run
result.json         what is reported; once it exists, only the upload is missing
lock                held while the run is trained
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
from pydantic import Field, RootModel

from device_agent.durable import locked, read_document, write_document
from device_agent.training.dp_sampling import ARRAYS, DPSamples, draw
from device_agent.training.run_plan import RunPlan
from shared.durable import write_durably
from shared.entropy import Entropy
from shared.errors import Unavailable
from shared.result import Result
from shared.strict_model import StrictModel
from shared.zo.lora import F32, adapter_file

KEPT_RUNS = 10  # directories; the newest
_CHECKPOINT = re.compile(r"step-(\d+)\.bin")


class ResourceUsage(StrictModel):
    """Time and memory used by all processes of a run; a kill loses what was not yet recorded."""

    train_seconds: float = Field(0, ge=0, description="of steps, with all that the loop does around the program")
    program_seconds: float = Field(0, ge=0, description="of these, inside the program")
    seconds: float = Field(0, ge=0)
    load_seconds: float = Field(
        0, ge=0, description="of the latest executor: loading methods, with packing the weights"
    )
    peak_rss_bytes: int = Field(0, ge=0)


# Log-probabilities of the rows of a preference run's examples at the run's start, nats, by split.
References = RootModel[dict[str, list[tuple[float, ...]]]]


class Checkpoints:
    """B and the optimizer's state after some steps, one NumPy archive each, keyed by the number of completed steps."""

    def __init__(self, path: Path) -> None:
        """path: a directory; the first write creates it."""
        self.path = path

    def steps(self) -> list[int]:
        """Returns the numbers of steps that have a checkpoint, ascending."""
        names = (_CHECKPOINT.fullmatch(file.name) for file in self.path.glob("*"))
        return sorted(int(name[1]) for name in names if name)

    def read(self, step: int) -> F32 | None:
        """Returns the state, float32 (M,), after `step` steps; None if the checkpoint is absent or damaged."""
        # A damaged archive raises errors of many kinds.
        with suppress(Exception), np.load(self._file(step)) as archive:
            state: F32 = archive["state"]
            return state
        return None

    def write(self, step: int, state: F32) -> None:
        """Stores the state, float32 (M,), after `step` steps; it is durable when this method returns."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        archive = io.BytesIO()
        np.savez(archive, state=state)
        write_durably(self._file(step), archive.getvalue())

    def keep(self, steps: Iterable[int]) -> None:
        """Removes all checkpoints except those of `steps`."""
        for step in set(self.steps()).difference(steps):
            self._file(step).unlink(missing_ok=True)

    def _file(self, step: int) -> Path:
        return self.path / f"step-{step}.bin"


class RunDirectory:
    """The directory of one job's run."""

    def __init__(self, path: Path) -> None:
        """path: see the module's docstring for its files."""
        self.path = path
        self.best, self.last = path / "best.safetensors", path / "last.safetensors"
        self.start, self.trajectory = path / "start.safetensors", path / "trajectory.bin"
        self.candidates = path / "candidates"
        self.dp_samples_file, self.charge = path / "draws.npz", path / "charge.json"
        self.rehearsed, self.held_out = path / "rehearsed.jsonl", path / "held_out.jsonl"
        self.result_file, self.figures_file = path / "result.json", path / "figures.json"
        self.references_file = path / "references.json"
        self.checkpoints = Checkpoints(path / "checkpoints")

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

    def begin(self, plan: RunPlan) -> None:
        """Creates the directory if necessary and writes the plan, whose paths may have changed since a kill."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_document(self.path / "run.json", plan)

    def plan(self) -> RunPlan:
        """Returns the plan written by `begin`."""
        return RunPlan.model_validate_json((self.path / "run.json").read_bytes())

    def begun_plan(self) -> RunPlan | None:
        """Returns the plan; None if the run has not begun, or if this agent cannot read its plan."""
        return read_document(self.path / "run.json", RunPlan)

    def figures(self) -> ResourceUsage:
        """Returns the recorded resource usage; zeros in a new run."""
        return read_document(self.figures_file, ResourceUsage) or ResourceUsage()

    def result(self) -> Result | None:
        """Returns the result if training is complete."""
        return read_document(self.result_file, Result)

    def finish(self, result: Result) -> None:
        """Records the result, after both adapters were written, and deletes secret samples and rehearsed records."""
        write_document(self.result_file, result)
        for path in (self.dp_samples_file, self.rehearsed, self.held_out):
            path.unlink(missing_ok=True)

    def dp_samples(self, plan: RunPlan, examples: int, entropy: Entropy = os.urandom) -> DPSamples:
        """Returns the stored samples and noise of a private run, after drawing and storing them if none of this form
        are there. entropy: for those not yet drawn.

        Raises InvalidDataset, or ValueError for other runs.
        """
        if plan.privacy is None:
            raise ValueError("a run without privacy has no secret samples")
        path, steps, queries = self.dp_samples_file, plan.training.steps, plan.manifest.recipe.noised_scalars
        if path.exists():
            with np.load(path, allow_pickle=False) as file:
                stored = DPSamples(int(file["examples"]), *(file[name] for name in ARRAYS))
            keys = steps if queries is None else 0
            if stored.examples == examples and (stored.noise.shape, len(stored.keys)) == ((steps, queries or 0), keys):
                return stored
        samples = draw(plan.privacy, examples, steps, queries, entropy)
        buffer = io.BytesIO()
        np.savez(buffer, examples=np.array(examples), **{name: getattr(samples, name) for name in ARRAYS})
        write_durably(path, buffer.getvalue())
        return samples

    def write_adapter(self, path: Path, flat: F32, plan: RunPlan, step: int) -> None:
        """Writes B (D,) after `step` steps as an adapter file; equal runs write equal bytes."""
        manifest = plan.manifest
        ids = {"job_id": plan.job_id, "recipe_id": manifest.recipe_id, "a_sha256": manifest.a_sha256}
        write_durably(path, adapter_file(flat, step=step, **ids))

    def lock(self) -> AbstractContextManager[object]:
        """Holds the run's exclusive lock. Raises Unavailable if another process trains the run."""
        held = Unavailable(f"another process trains the run in {self.path}; stop that process")
        return locked(self.path / "lock", held)

    def remove(self) -> None:
        """Deletes the run."""
        shutil.rmtree(self.path, ignore_errors=True)


def prune_runs(runs: Path, keep: int = KEPT_RUNS) -> None:
    """Deletes all but the newest `keep` run directories. A run that was charged and has no result is kept as well,
    because another run of its job would be charged again.
    """
    directories = sorted((path for path in runs.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    prunable = [run for run in map(RunDirectory, directories) if run.result_file.exists() or not run.charge.exists()]
    for run in prunable[: max(len(prunable) - keep, 0)]:
        run.remove()
