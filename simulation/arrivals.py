"""Who takes part in a round and what each of them makes: synchronously, or whenever a device lands.

What is drawn depends on the seed alone, and answers are taken in the order in which they were asked for, so that the
number of workers changes nothing. Knows not what becomes of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from shared.canonical import sha256_hex
from shared.cohort import RoundTask
from shared.federation.algorithms import find
from simulation.attacks import poisoned
from simulation.draws import generator, job_seed
from simulation.executors import Executor, Handle, in_order
from simulation.records import Flight
from simulation.settings import SimulationSettings
from simulation.shards import Shard
from simulation.workshop import Errand, Work

F32 = NDArray[np.float32]
FAR = datetime(9999, 1, 1, tzinfo=UTC)  # a simulated round has no clock that a device could miss
SPEED, LENGTH = 0.75, 0.25  # sigma of the lognormals: of devices' speeds, and of one device's jobs
Tell = Callable[[str, int, int], None]  # what is done, how much of it, of how much
Version = Callable[[int], F32]  # B (D,) of a version


@dataclass(frozen=True)
class Arrival:
    """One device's finished work."""

    errand: Errand
    work: Work
    staleness: int


@dataclass
class Arrivals:
    """What has come in a round. lost: devices that did the work and whose answer did not come."""

    asked: int = 0
    came: list[Arrival] = field(default_factory=list)
    lost: list[Arrival] = field(default_factory=list)
    dropped: int = 0
    flights: tuple[Flight, ...] = ()
    flown: int = 0
    clock: float = 0.0


class Population:
    """The devices, and what each of them is told to do."""

    def __init__(self, settings: SimulationSettings, shards: Sequence[Shard]) -> None:
        self.settings, self._shards = settings, shards
        self.poisoned = poisoned(settings.faults, settings.devices, settings.seed)
        self._privacy = None if settings.cohort.privacy is None else settings.cohort.privacy.examples

    def errand(self, number: int, device: int, job: int, version: int, start: F32) -> Errand:
        """A device's job in round `number` from `version`. job: with the device makes the job's seed."""
        settings, cohort = self.settings, self.settings.cohort
        return Errand(
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
    """Round `number`: all who are asked train from the version before, and some of them do not answer."""
    settings = population.settings
    rng = generator(settings.seed, "asked", number)
    asked = sorted(rng.choice(settings.devices, settings.asked, replace=False).tolist())
    dropping = {device for device in asked if rng.random() < settings.faults.dropout}
    # Of masked rounds a device may also leave later, which others then have to help with.
    training = asked if settings.cohort.upload == "masked" else [each for each in asked if each not in dropping]
    errands = [population.errand(number, device, number, number - 1, flat) for device in training]
    found = Arrivals(len(asked), dropped=len(dropping))
    tell(f"round {number}", 0, len(errands))
    works = in_order(executor, "train", ((errand,) for errand in errands))
    for done, (errand, work) in enumerate(zip(errands, works, strict=True), 1):
        (found.lost if errand.device in dropping else found.came).append(Arrival(errand, work, 0))
        tell(f"round {number}", done, len(errands))
    return found


class Asynchronous:
    """As many devices train at any time as are asked, and who lands makes room for another.

    A device's speed is drawn once, a job's length for each; who lands first is decided by that clock, not by this
    machine's.
    """

    def __init__(self, population: Population, executor: Executor, version: Version, tell: Tell) -> None:
        self._population, self._executor, self._version, self._tell = population, executor, version, tell
        self._server = find(population.settings.cohort.algorithm).server
        self._handles: dict[int, tuple[Errand, Handle]] = {}  # of flights that are in the air

    def until(self, number: int, before: Arrivals) -> Arrivals:
        """What comes until version `number` can be made. before: how the last version left the air."""
        settings = self._population.settings
        found, flights = Arrivals(flown=before.flown, clock=before.clock), list(before.flights)
        landed = set[int]()
        for flight in flights:
            self._take_off(number, flight)
        while not self._server.full(len(landed), settings.asked):
            while len(flights) < settings.asked:
                flights.append(_next(settings, found, {flight.device for flight in flights}, number - 1))
                self._take_off(number, flights[-1])
                found.flown += 1
            landing = min(flights, key=lambda flight: (flight.lands, flight.number))
            flights.remove(landing)
            found.clock, found.asked = landing.lands, found.asked + 1
            errand, handle = self._handles.pop(landing.number)
            arrival = Arrival(errand, handle.result(), number - 1 - landing.version)
            if generator(settings.seed, "lost", landing.number).random() < settings.faults.dropout:
                found.dropped += 1
                found.lost.append(arrival)
            else:
                # A device may land twice before the buffer is full: it is one member, whose later update counts.
                found.came.append(arrival)
                landed.add(landing.device)
            self._tell(f"version {number}", len(landed), settings.cohort.algorithm.buffer_size)
        found.flights = tuple(flights)
        return found

    def _take_off(self, number: int, flight: Flight) -> None:
        """Has a flight's work done, unless it is under way already, which after a kill it is not."""
        if flight.number not in self._handles:
            start = self._version(flight.version)
            errand = self._population.errand(number, flight.device, flight.number, flight.version, start)
            self._handles[flight.number] = errand, self._executor.submit("train", errand)


def _next(settings: SimulationSettings, found: Arrivals, flying: set[int], version: int) -> Flight:
    rng = generator(settings.seed, "flight", found.flown)
    device = int(rng.choice([each for each in range(settings.devices) if each not in flying]))
    speed = generator(settings.seed, "speed", device).lognormal(sigma=SPEED)
    lands = found.clock + float(speed * rng.lognormal(sigma=LENGTH))
    return Flight(number=found.flown, device=device, version=version, lands=lands)
