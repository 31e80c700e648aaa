"""A worker: one loaded program and the pool of examples, with which any virtual device is trained or evaluated.

Each process opens the program once. Every call loads its own B, so virtual devices share the program without affecting
each other, and a result does not depend on the process. They share the states of the frozen layers, which depend on the
text alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_agent.executors.python import open_program, use_threads
from device_agent.training.checkpointed_trainer import trainer_of
from device_agent.training.data import Splits
from device_agent.training.evaluation import SplitMetrics, log_probabilities, split_metrics
from device_agent.training.prefix import PrefixCache, prefix_cache
from device_agent.training.run_directory import RunDirectory
from device_agent.training.run_plan import RunPlan
from shared.canonical import sha256_hex
from shared.federation.cohort import RoundTask
from shared.job import Progress
from shared.privacy import ExamplePrivacy
from shared.program import ProgramManifest
from shared.result import Result
from shared.stop_signal import never
from shared.task import Task
from shared.tokenizer import read_tokenizer
from shared.training_settings import TrainingSettings
from shared.zo.encoding import Example
from shared.zo.lora import dump_adapter
from simulation import randomness
from simulation.attacks import poison_examples
from simulation.pool import read_pool
from simulation.settings import FaultSettings
from simulation.shards import Shard

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class WorkerConfig:
    """The paths and the number of threads of a worker. The paths must be the same on every machine."""

    program: Path  # a directory with a program and its manifest
    data: tuple[Path, ...]
    task: str  # JSON
    most_test: int
    threads: int
    log: Path  # output of libraries in worker processes


@dataclass(frozen=True)
class LocalTask:
    """The local training of one device in a round."""

    device: int
    shard: Shard
    start: F32  # B (D,)
    start_sha256: str | None  # sha256 of the starting version; None: B = 0
    training: TrainingSettings
    round: RoundTask | None  # None: the job belongs to no round
    privacy: ExamplePrivacy | None  # of the run
    seed: int  # replaces the operating system's random source
    faults: FaultSettings | None  # the attack of a poisoned device; None: honest


@dataclass(frozen=True)
class TrainingOutput:
    """The result of a device's training: the files it would upload, and its metrics."""

    adapter: bytes
    ledger: bytes
    result: Result
    seconds: float


class Worker:
    """The program and the pool of one process."""

    def __init__(self, config: WorkerConfig) -> None:
        use_threads(config.threads)
        self.manifest = ProgramManifest.model_validate_json((config.program / "manifest.json").read_bytes())
        self.task = Task.model_validate_json(config.task)
        self._paths = {file.role: config.program / file.name for file in self.manifest.training_files}
        tokenizer = read_tokenizer(Path(self._paths["tokenizer"]).read_bytes())
        self.pool = read_pool(config.data, self.task, tokenizer, self.manifest.recipe, config.most_test)
        self._program = open_program(self.manifest, self._paths["program"], self._paths["weights"], resident=True)
        self._caches: dict[bool, PrefixCache | None] = {}  # by whether lengths are the texts' own

    def train(self, local_task: LocalTask) -> TrainingOutput:
        """Trains one device with the agent's trainer."""
        with TemporaryDirectory(dir=memory_directory()) as directory:
            return self._train(local_task, RunDirectory(Path(directory)))

    def _train(self, local_task: LocalTask, run: RunDirectory) -> TrainingOutput:
        examples = [self.pool.train[index] for index in local_task.shard.train]
        if local_task.faults is not None:
            examples = list(poison_examples(local_task.faults, examples))
        held_out = [self.pool.train[index] for index in local_task.shard.held_out]
        if local_task.start_sha256 is not None:
            run.start.write_bytes(dump_adapter(local_task.start, {}))
        plan = RunPlan(
            job_id=f"device-{local_task.device}",
            task=self.task,
            training=local_task.training,
            manifest=self.manifest,
            dataset=Path(f"shard-{local_task.device}"),
            program=self._paths["program"],
            weights=self._paths["weights"],
            tokenizer=self._paths["tokenizer"],
            noise_key=sha256_hex(b""),  # a shard's counts leave no device
            start=None if local_task.start_sha256 is None else run.start,
            start_sha256=local_task.start_sha256,
            round=local_task.round,
            privacy=local_task.privacy,
        )
        # As on a real device, a private run is not evaluated.
        splits = Splits(examples, held_out if local_task.privacy is None else (), None, len(examples))
        if local_task.privacy is not None:
            entropy = randomness.entropy(local_task.seed, "device", local_task.device)
            run.dp_samples(plan, len(examples), entropy)  # the trainer reads what is drawn here
        frozen = self._cache(plan.dynamic_length)
        result = trainer_of(self.manifest)(run, plan, splits, self._program, ignore, never, frozen=frozen).train()
        return TrainingOutput(run.best.read_bytes(), run.trajectory.read_bytes(), result, result.train_seconds)

    def measure(self, flat: F32, shards: tuple[tuple[int, ...], ...]) -> list[SplitMetrics]:
        """Evaluates B on the held-out examples of some devices."""
        self._program.load(flat)
        return [self._measure([self.pool.train[index] for index in shard]) for shard in shards]

    def test(self, flat: F32) -> SplitMetrics:
        """Evaluates B on the test examples."""
        self._program.load(flat)
        return self._measure(self.pool.test)

    def _measure(self, examples: Sequence[Example]) -> SplitMetrics:
        recipe, dynamic = self.manifest.recipe, self.manifest.dynamic_length
        frozen = self._cache(dynamic) if "score_suffix" in self.manifest.methods else None
        scores = log_probabilities(self._program, examples, recipe, dynamic=dynamic, frozen=frozen)
        return split_metrics(examples, scores, recipe)

    def _cache(self, dynamic: bool) -> PrefixCache | None:
        """Returns the states of the frozen layers that all runs share, which are computed when first used."""
        if dynamic not in self._caches:
            self._caches[dynamic] = prefix_cache(self._program, self.manifest, dynamic=dynamic)
        return self._caches[dynamic]


def memory_directory() -> Path | None:
    """Returns a directory whose files stay in memory, where a sync costs nothing; None where there is none."""
    path = Path("/dev/shm")  # noqa: S108  # files below it get unpredictable names
    return path if os.access(path, os.W_OK) else None


def ignore(_progress: Progress) -> None:
    """Discards a progress report."""


@lru_cache(maxsize=1)
def worker(config: WorkerConfig) -> Worker:
    """Returns this process's worker."""
    return Worker(config)


def call(config: WorkerConfig, method: str, arguments: tuple[Any, ...]) -> Any:
    """Calls one method of this process's worker. Executors run this function."""
    return getattr(worker(config), method)(*arguments)
