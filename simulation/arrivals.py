"""Selects the devices of a round and collects their results, synchronously or asynchronously.

All random choices depend on the seed only, and results are collected in the order of the requests, so the number of
workers does not change the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from shared.canonical import sha256_hex
from shared.federation.algorithms import algorithm_of
from shared.federation.cohort import RoundTask
from shared.zo.lora import dump_adapter
from simulation.attacks import poisoned_devices
from simulation.executors import Executor, results_in_order
from simulation.randomness import generator, job_seed
from simulation.records import RunningTraining
from simulation.settings import SimulationSettings
from simulation.shards import Shard
from simulation.worker import LocalTask, TrainingOutput

F32 = NDArray[np.float32]
NO_DEADLINE = datetime(9999, 1, 1, tzinfo=UTC)  # deadline of simulated rounds, which is never reached
# Sigma of the lognormal distributions of devices' speeds and of the durations of a device's tasks.
SPEED_SIGMA, DURATION_SIGMA = 0.75, 0.25
ProgressCallback = Callable[[str, int, int], None]  # progress callback: activity, amount done, total amount
VersionLoader = Callable[[int], F32]  # returns B (D,) of a version


@dataclass(frozen=True)
class Arrival:
    """The finished training of one device."""

    local_task: LocalTask
    output: TrainingOutput
    staleness: int


@dataclass
class Arrivals:
    """The results of a round. lost: results of devices that trained but dropped out. clock: simulated time."""

    selected: int = 0
    received: list[Arrival] = field(default_factory=list)
    lost: list[Arrival] = field(default_factory=list)
    dropped: int = 0
    in_progress: tuple[RunningTraining, ...] = ()
    started_count: int = 0
    clock: float = 0.0


class Population:
    """The virtual devices and their local tasks."""

    def __init__(self, settings: SimulationSettings, shards: Sequence[Shard]) -> None:
        self.settings, self._shards = settings, shards
        self.poisoned = poisoned_devices(settings.faults, settings.devices, settings.seed)
        self._privacy = None if settings.cohort.privacy is None else settings.cohort.privacy.examples

    def local_task(self, number: int, device: int, job: int, version: int, start: F32) -> LocalTask:
        """Returns a device's job in round `number`, starting from `version`. job: part of the job's seed."""
        settings, cohort = self.settings, self.settings.cohort
        return LocalTask(
            device=device,
            shard=self._shards[device],
            start=start,
            start_sha256=None if version == 0 else sha256_hex(dump_adapter(start, {})),
            training=cohort.training.model_copy(update={"seed": job_seed(settings.seed, "job", job, device)}),
            round=RoundTask(
                cohort=cohort.name,
                number=number,
                algorithm=cohort.algorithm,
                upload=cohort.upload,
                deadline=NO_DEADLINE,
            ),
            privacy=self._privacy,
            seed=job_seed(settings.seed, "secret", job, device),
            faults=settings.faults if device in self.poisoned else None,
        )


def run_synchronous_round(
    population: Population, executor: Executor, number: int, flat: F32, on_progress: ProgressCallback
) -> Arrivals:
    """Runs round `number`: all selected devices train from the previous version, and some drop out."""
    settings = population.settings
    rng = generator(settings.seed, "asked", number)
    selected = sorted(rng.choice(settings.devices, settings.devices_per_round, replace=False).tolist())
    dropped_devices = {device for device in selected if rng.random() < settings.faults.dropout}
    # In masked rounds a device may also drop out later, so all of them train.
    training = (
        selected
        if settings.cohort.upload == "masked"
        else [device for device in selected if device not in dropped_devices]
    )
    local_tasks = [population.local_task(number, device, number, number - 1, flat) for device in training]
    arrivals = Arrivals(len(selected), dropped=len(dropped_devices))
    on_progress(f"round {number}", 0, len(local_tasks))
    outputs = results_in_order(executor, "train", ((local_task,) for local_task in local_tasks))
    for completed, (local_task, output) in enumerate(zip(local_tasks, outputs, strict=True), 1):
        (arrivals.lost if local_task.device in dropped_devices else arrivals.received).append(
            Arrival(local_task, output, 0)
        )
        on_progress(f"round {number}", completed, len(local_tasks))
    return arrivals


class AsynchronousTraining:
    """Asynchronous training: a fixed number of devices train at a time, and each that finishes is replaced by another.

    Each device has a random speed and each task a random duration, which determine the order in which they finish.
    """

    def __init__(
        self, population: Population, executor: Executor, load_version: VersionLoader, on_progress: ProgressCallback
    ) -> None:
        self._population, self._executor = population, executor
        self._load_version, self._on_progress = load_version, on_progress
        self._server = algorithm_of(population.settings.cohort.algorithm).server
        self._handles: dict[int, tuple[LocalTask, Future[TrainingOutput]]] = {}  # trainings in progress

    def collect(self, number: int, previous: Arrivals) -> Arrivals:
        """Collects results until version `number` can be made. previous: the state after the last version."""
        settings = self._population.settings
        arrivals = Arrivals(started_count=previous.started_count, clock=previous.clock)
        running = list(previous.in_progress)
        finished_devices = set[int]()
        for training in running:
            self._start_training(number, training)
        while not self._server.is_complete(len(finished_devices), settings.devices_per_round):
            while len(running) < settings.devices_per_round:
                running.append(
                    _next_training(settings, arrivals, {training.device for training in running}, number - 1)
                )
                self._start_training(number, running[-1])
                arrivals.started_count += 1
            finished = min(running, key=lambda training: (training.finishes_at, training.number))
            running.remove(finished)
            arrivals.clock, arrivals.selected = finished.finishes_at, arrivals.selected + 1
            local_task, handle = self._handles.pop(finished.number)
            arrival = Arrival(local_task, handle.result(), number - 1 - finished.version)
            if generator(settings.seed, "lost", finished.number).random() < settings.faults.dropout:
                arrivals.dropped += 1
                arrivals.lost.append(arrival)
            else:
                # A device that finishes twice before the buffer is full is one member, whose later update counts.
                arrivals.received.append(arrival)
                finished_devices.add(finished.device)
            self._on_progress(f"version {number}", len(finished_devices), settings.cohort.algorithm.buffer_size)
        arrivals.in_progress = tuple(running)
        return arrivals

    def _start_training(self, number: int, training: RunningTraining) -> None:
        """Starts a training unless it is running already; after a restart none is running."""
        if training.number not in self._handles:
            start = self._load_version(training.version)
            local_task = self._population.local_task(number, training.device, training.number, training.version, start)
            self._handles[training.number] = local_task, self._executor.submit("train", local_task)


def _next_training(
    settings: SimulationSettings, arrivals: Arrivals, busy_devices: set[int], version: int
) -> RunningTraining:
    rng = generator(settings.seed, "flight", arrivals.started_count)
    device = int(rng.choice([candidate for candidate in range(settings.devices) if candidate not in busy_devices]))
    speed = generator(settings.seed, "speed", device).lognormal(sigma=SPEED_SIGMA)
    finishes_at = arrivals.clock + float(speed * rng.lognormal(sigma=DURATION_SIGMA))
    return RunningTraining(number=arrivals.started_count, device=device, version=version, finishes_at=finishes_at)
