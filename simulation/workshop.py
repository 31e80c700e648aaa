"""A worker: one loaded program and the pool, with which any virtual device can train and any B be measured.

The program is opened once in a process; B is state that each errand loads, so that virtual devices share it and do not
meet. An errand is a function of what it is given: it comes out the same in whichever process it runs. Knows no round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from device_agent.data import Splits
from device_agent.evaluation import Measured, measure
from device_agent.journal import RunPlan
from device_agent.runtimes import open_runtime, use_threads
from device_agent.trainer import Trainer
from device_agent.transient import TransientRun
from shared.cohort import RoundTask
from shared.job import Result, TrainingSettings
from shared.privacy import ExamplePrivacy
from shared.program import ProgramManifest
from shared.task import Task
from simulation import draws
from simulation.attacks import spoil_examples
from simulation.pool import read_pool
from simulation.settings import FaultSettings
from simulation.shards import Shard

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Place:
    """Where a worker finds what it needs, and how many threads it may take. The same paths on every machine."""

    program: Path  # a directory with a program and its manifest
    data: tuple[Path, ...]
    task: str  # JSON
    most_test: int
    threads: int
    log: Path  # for what libraries print in processes of their own


@dataclass(frozen=True)
class Errand:
    """One device's local work in a round."""

    device: int
    shard: Shard
    start: F32  # B (D,)
    start_sha256: str | None  # of the file that it stands for; None: B = 0
    training: TrainingSettings
    round: RoundTask | None  # None: the job is the device's own
    privacy: ExamplePrivacy | None  # of the run
    seed: int  # of what a real device draws from its operating system
    faults: FaultSettings | None  # of a poisoned device


@dataclass(frozen=True)
class Work:
    """What a device made: the file it would upload, the ledger it would upload, and its own figures."""

    adapter: bytes
    ledger: bytes
    result: Result
    seconds: float


class Workshop:
    """The program and the pool of one process."""

    def __init__(self, place: Place) -> None:
        use_threads(place.threads)
        self.manifest = ProgramManifest.model_validate_json((place.program / "manifest.json").read_bytes())
        self.task = Task.model_validate_json(place.task)
        self._paths = {file.role: place.program / file.name for file in self.manifest.training_files}
        tokenizer = Tokenizer.from_file(str(self._paths["tokenizer"]))
        self.pool = read_pool(place.data, self.task, tokenizer, self.manifest.recipe, place.most_test)
        self._runtime = open_runtime(self.manifest, self._paths["program"], self._paths["weights"], resident=True)

    def train(self, errand: Errand) -> Work:
        """Trains one device by the agent's own trainer."""
        examples = [self.pool.train[index] for index in errand.shard.train]
        if errand.faults is not None:
            examples = list(spoil_examples(errand.faults, examples))
        held_out = [self.pool.train[index] for index in errand.shard.held_out]
        plan = RunPlan(
            job_id=f"device-{errand.device}",
            task=self.task,
            training=errand.training,
            manifest=self.manifest,
            dataset=Path(f"shard-{errand.device}"),
            program=self._paths["program"],
            weights=self._paths["weights"],
            tokenizer=self._paths["tokenizer"],
            start=None if errand.start_sha256 is None else Path("start.safetensors"),
            start_sha256=errand.start_sha256,
            round=errand.round,
            privacy=errand.privacy,
        )
        # As a device reads them: a private run measures nothing.
        splits = Splits(examples, held_out if errand.privacy is None else (), None)
        run = TransientRun(errand.start, draws.entropy(errand.seed, "device", errand.device))
        result = Trainer(run, plan, splits, self._runtime, lambda progress: None, lambda: False).train()
        return Work(run.files[run.best], bytes(run.ledger_data), result, result.train_seconds)

    def measure(self, flat: F32, shards: tuple[tuple[int, ...], ...]) -> list[Measured]:
        """How well B does on the held-out examples of some devices, one by one."""
        self._runtime.load(flat)
        recipe, dynamic = self.manifest.recipe, self.manifest.dynamic_length
        return [
            measure(self._runtime, [self.pool.train[index] for index in shard], recipe, dynamic=dynamic)
            for shard in shards
        ]

    def test(self, flat: F32) -> Measured:
        """How well B does on the examples that are nobody's."""
        self._runtime.load(flat)
        return measure(self._runtime, self.pool.test, self.manifest.recipe, dynamic=self.manifest.dynamic_length)


@lru_cache(maxsize=1)
def workshop(place: Place) -> Workshop:
    """This process's."""
    return Workshop(place)


def call(place: Place, method: str, arguments: tuple[Any, ...]) -> Any:
    """One method of this process's workshop: what executors run, wherever they run it."""
    return getattr(workshop(place), method)(*arguments)
