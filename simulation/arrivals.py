"""Selects the devices of a round and collects their results, synchronously or asynchronously.

All random choices depend on the seed only, and results are collected in the order of the requests, so the number of
workers does not change the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from shared.canonical import sha256_hex
from shared.federation.algorithms import find
from shared.federation.cohort import RoundTask
from simulation.attacks import poisoned
from simulation.draws import generator, job_seed
from simulation.executors import Executor, Handle, in_order
from simulation.records import Flight
from simulation.settings import SimulationSettings
from simulation.shards import Shard
from simulation.worker import LocalTask, Work

F32 = NDArray[np.float32]
FAR = datetime(9999, 1, 1, tzinfo=UTC)  # deadline of simulated rounds, which is never reached
# Sigma of lognormal distributions: of devices' speeds and of the lengths of a device's tasks.
SPEED, LENGTH = 0.75, 0.25
Tell = Callable[[str, int, int], None]  # progress callback: activity, amount done, total amount
Version = Callable[[int], F32]  # returns B (D,) of a version


@dataclass(frozen=True)
class Arrival:
    """The finished training of one device."""

    local_task: LocalTask
    work: Work
    staleness: int


@dataclass
class Arrivals:
    """The results of a round. lost: results of devices that trained but dropped out."""

    asked: int = 0
    came: list[Arrival] = field(default_factory=list)
    lost: list[Arrival] = field(default_factory=list)
    dropped: int = 0
    flights: tuple[Flight, ...] = ()
    flown: int = 0
    clock: float = 0.0


class Population:
    """The virtual devices and their local tasks."""

    def __init__(self, settings: SimulationSettings, shards: Sequence[Shard]) -> None:
        self.settings, self._shards = settings, shards
        self.poisoned = poisoned(settings.faults, settings.devices, settings.seed)
        self._privacy = None if settings.cohort.privacy is None else settings.cohort.privacy.examples

    def local_task(self, number: int, device: int, job: int, version: int, start: F32) -> LocalTask:
        """Returns a device's job in round `number`, starting from `version`. job: part of the job's seed."""
        settings, cohort = self.settings, self.settings.cohort
        return LocalTask(
            device=device,
            shard=self._shards[device],
            start=start,
            start_sha256=None if version == 0 else sha256_hex(start.tobytes()),
            training=cohort.training.model_copy(update={"seed": job_seed(settings.seed, "job", job, device)}),
            round=RoundTask(
                cohort=cohort.name, number=number, algorithm=cohort.algorithm, upload=cohort.upload, deadline=FAR
            ),
            privacy=self._privacy,
            seed=job_seed(settings.seed, "secret", job, device),
            faults=settings.faults if device in self.poisoned else None,
        )


def synchronous(population: Population, executor: Executor, number: int, flat: F32, tell: Tell) -> Arrivals:
    """Runs round `number`: all selected devices train from the previous version, and some drop out."""
    settings = population.settings
    rng = generator(settings.seed, "asked", number)
    asked = sorted(rng.choice(settings.devices, settings.asked, replace=False).tolist())
    dropping = {device for device in asked if rng.random() < settings.faults.dropout}
    # In masked rounds a device may also drop out later, so all of them train.
    training = asked if settings.cohort.upload == "masked" else [each for each in asked if each not in dropping]
    local_tasks = [population.local_task(number, device, number, number - 1, flat) for device in training]
    arrivals = Arrivals(len(asked), dropped=len(dropping))
    tell(f"round {number}", 0, len(local_tasks))
    works = in_order(executor, "train", ((local_task,) for local_task in local_tasks))
    for done, (local_task, work) in enumerate(zip(local_tasks, works, strict=True), 1):
        (arrivals.lost if local_task.device in dropping else arrivals.came).append(Arrival(local_task, work, 0))
        tell(f"round {number}", done, len(local_tasks))
    return arrivals


class Asynchronous:
    """Asynchronous training: a fixed number of devices train at a time, and each that finishes is replaced by another.

    Each device has a random speed and each task a random length. Their simulated clock decides who finishes first.
    """

    def __init__(self, population: Population, executor: Executor, version: Version, tell: Tell) -> None:
        self._population, self._executor, self._version, self._tell = population, executor, version, tell
        self._server = find(population.settings.cohort.algorithm).server
        self._handles: dict[int, tuple[LocalTask, Handle]] = {}  # flights in progress

    def until(self, number: int, before: Arrivals) -> Arrivals:
        """Collects results until version `number` can be made. before: the state after the last version."""
        settings = self._population.settings
        arrivals, flights = Arrivals(flown=before.flown, clock=before.clock), list(before.flights)
        landed = set[int]()
        for flight in flights:
            self._take_off(number, flight)
        while not self._server.full(len(landed), settings.asked):
            while len(flights) < settings.asked:
                flights.append(_next(settings, arrivals, {flight.device for flight in flights}, number - 1))
                self._take_off(number, flights[-1])
                arrivals.flown += 1
            landing = min(flights, key=lambda flight: (flight.lands, flight.number))
            flights.remove(landing)
            arrivals.clock, arrivals.asked = landing.lands, arrivals.asked + 1
            local_task, handle = self._handles.pop(landing.number)
            arrival = Arrival(local_task, handle.result(), number - 1 - landing.version)
            if generator(settings.seed, "lost", landing.number).random() < settings.faults.dropout:
                arrivals.dropped += 1
                arrivals.lost.append(arrival)
            else:
                # A device that finishes twice before the buffer is full is one member, whose later update counts.
                arrivals.came.append(arrival)
                landed.add(landing.device)
            self._tell(f"version {number}", len(landed), settings.cohort.algorithm.buffer_size)
        arrivals.flights = tuple(flights)
        return arrivals

    def _take_off(self, number: int, flight: Flight) -> None:
        """Starts a flight's training unless it is running; after a restart it is not."""
        if flight.number not in self._handles:
            start = self._version(flight.version)
            local_task = self._population.local_task(number, flight.device, flight.number, flight.version, start)
            self._handles[flight.number] = local_task, self._executor.submit("train", local_task)


def _next(settings: SimulationSettings, arrivals: Arrivals, flying: set[int], version: int) -> Flight:
    rng = generator(settings.seed, "flight", arrivals.flown)
    device = int(rng.choice([each for each in range(settings.devices) if each not in flying]))
    speed = generator(settings.seed, "speed", device).lognormal(sigma=SPEED)
    lands = arrivals.clock + float(speed * rng.lognormal(sigma=LENGTH))
    return Flight(number=arrivals.flown, device=device, version=version, lands=lands)
