"""Runs the rounds of a simulation: devices train, and the product's server half aggregates their uploads.

Each round is stored before the next one starts, so an interrupted simulation resumes after the last stored round.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from device_agent.training.evaluation import SplitMetrics
from shared.canonical import sha256_hex
from shared.errors import InvalidUpload
from shared.federation.aggregation import Combined, aggregate
from shared.federation.algorithms import find
from shared.federation.optimizers import advance, begin, load_state
from shared.federation.sources import MemorySource
from shared.federation.update import Update, euclidean_norm
from shared.program import ProgramManifest
from simulation.arrivals import Arrival, Arrivals, Asynchronous, Population, Tell, synchronous
from simulation.draws import entropy
from simulation.executors import Executor, in_order
from simulation.privacy import overspent, spent
from simulation.records import Bytes, Round, Store
from simulation.secure_aggregation import combine_masked
from simulation.settings import SimulationSettings
from simulation.shards import Shard
from simulation.uploads import member, receive, send

F32 = NDArray[np.float32]
MEASURED_TOGETHER = 16  # devices evaluated in one call


@dataclass(frozen=True)
class Outcome:
    """A round's aggregated update, or why there is none.

    masked_bytes: mean bytes sent by a device of a masked round.
    """

    combined: Combined | None
    why: str = ""
    masked_bytes: float = 0.0


class Simulator:
    """The state of a simulated cohort."""

    def __init__(
        self,
        settings: SimulationSettings,
        manifest: ProgramManifest,
        shards: Sequence[Shard],
        executor: Executor,
        store: Store,
        tell: Tell = lambda what, done, of: None,
    ) -> None:
        """Resumes from the store's last round. tell: callback for progress."""
        self._settings, self._cohort, self._manifest = settings, settings.cohort, manifest
        self._shards, self._executor, self._store, self._tell = shards, executor, store, tell
        self._population, self._algorithm = Population(settings, shards), find(settings.cohort.algorithm)
        self._asynchronous = Asynchronous(
            self._population, executor, lambda version: store.adapter(version, manifest.size), tell
        )
        self.rounds = store.rounds()
        self.flat: F32 = np.zeros(manifest.size, np.float32)  # B (D,) of the latest version
        self._optimizer = begin(self._cohort.optimizer, manifest.size)
        if self.rounds:
            self.flat = store.adapter(len(self.rounds) - 1, manifest.size)
            self._optimizer = load_state(store.optimizer(len(self.rounds) - 1), self._cohort.optimizer, manifest.size)

    def run(self) -> list[Round]:
        """Runs all rounds. Returns their records; number 0 is the state before the first round."""
        if not self.rounds:
            self._keep(Arrivals(), [], {}, Outcome(None, "nothing has been trained yet"), time.monotonic())
        while (number := len(self.rounds)) <= self._settings.rounds:
            began = time.monotonic()
            if (why := overspent(self._settings, self.rounds)) is not None:
                self._keep(Arrivals(), [], {}, Outcome(None, why), began)
                continue
            arrivals = self._gather(number)
            updates, refused = self._receive(arrivals.came, number)
            self._keep(arrivals, updates, refused, self._combine(updates, arrivals, number), began)
        return self.rounds

    def _gather(self, number: int) -> Arrivals:
        if not self._cohort.algorithm.asynchronous:
            return synchronous(self._population, self._executor, number, self.flat, self._tell)
        last = self.rounds[-1]
        return self._asynchronous.until(number, Arrivals(flights=last.flights, flown=last.flown, clock=last.clock))

    def _receive(self, came: Iterable[Arrival], number: int) -> tuple[list[Update], dict[str, int]]:
        """Returns the accepted updates, and the reasons for rejected ones."""
        updates, refused = [], Counter[str]()
        for arrival in came:
            sent = send(arrival, self._cohort.upload, self._settings.seed, number)
            try:
                updates.append(receive(sent, self._cohort, self._algorithm))
            except InvalidUpload as error:
                refused[error.detail] += 1
        # A device that finished twice is one member, whose later update counts.
        return list({update.member: update for update in updates}.values()), dict(refused)

    def _combine(self, updates: list[Update], arrivals: Arrivals, number: int) -> Outcome:
        """Returns the round's aggregated update, or why there is none."""
        cohort = self._cohort
        if len(updates) < cohort.quorum:
            return Outcome(None, f"{len(updates)} updates were accepted; the quorum is {cohort.quorum}")
        if cohort.masking is not None:
            lost, _ = self._receive(arrivals.lost, number)
            masked = combine_masked(cohort, self._manifest, number, updates, lost, self._settings.seed)
            return Outcome(masked.combined, masked.why, masked.bytes_sent)
        noise = entropy(self._settings.seed, "members", number)
        return Outcome(aggregate(cohort, MemorySource(updates), entropy=noise))

    def _keep(
        self,
        arrivals: Arrivals,
        updates: Sequence[Update],
        refused: dict[str, int],
        outcome: Outcome,
        began: float,
    ) -> None:
        """Updates the adapter, evaluates it and stores the round."""
        combined = outcome.combined
        if combined is not None:
            self.flat, self._optimizer = advance(self._cohort.optimizer, self._optimizer, self.flat, combined.update)
        tested, devices = self._measure()
        results = [arrival.work.result for arrival in arrivals.came if arrival.local_task.faults is None]
        spoilt = {member(device) for device in self._population.poisoned}
        counted = updates if combined is not None else ()
        trained = [arrival.local_task.device for arrival in (*arrivals.came, *arrivals.lost)]
        record = Round(
            number=len(self.rounds),
            published=combined is not None,
            why=outcome.why,
            asked=arrivals.asked,
            trained=tuple(trained),
            dropped=arrivals.dropped,
            refused=refused,
            counted=0 if combined is None else combined.count,
            poisoned=sum(update.member in spoilt for update in counted),
            clipped=0 if combined is None else combined.clipped,
            stale=fmean(update.staleness for update in counted) if counted else 0.0,
            update_norm=0.0 if combined is None else euclidean_norm(combined.update),
            accuracy=tested.accuracy,
            loss=tested.loss,
            devices=devices,
            start_accuracy=_mean([each.start_accuracy or each.zero_shot_accuracy for each in results]),
            tuned_accuracy=_mean([each.tuned_accuracy for each in results]),
            bytes=_bytes(arrivals.came, outcome.masked_bytes),
            epsilon=spent(self._settings, self.rounds, trained, combined is not None),
            flights=arrivals.flights,
            flown=arrivals.flown,
            clock=arrivals.clock,
            b_sha256=sha256_hex(self.flat.astype("<f4").tobytes()),
            seconds=time.monotonic() - began,
        )
        self._store.keep(record, self.flat, self._optimizer.dump())
        self.rounds.append(record)

    def _measure(self) -> tuple[SplitMetrics, dict[int, float]]:
        """Evaluates B on the test examples and on the held-out examples of the selected devices."""
        tested = self._executor.submit("test", self.flat)
        selected = range(min(self._settings.devices, self._settings.measured))
        shards = [self._shards[device].held_out for device in selected]
        groups = [tuple(shards[at : at + MEASURED_TOGETHER]) for at in range(0, len(shards), MEASURED_TOGETHER)]
        answers = in_order(self._executor, "measure", ((self.flat, group) for group in groups))
        metrics = [each for answer in answers for each in answer]
        whole: SplitMetrics = tested.result()
        return whole, {device: each.accuracy for device, each in zip(selected, metrics, strict=True)}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _bytes(came: Sequence[Arrival], masked: float) -> Bytes:
    if not came:
        return Bytes()
    return Bytes(
        weights=fmean(len(arrival.work.adapter) for arrival in came),
        trajectory=fmean(len(arrival.work.ledger) for arrival in came),
        masked=masked,
    )
