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
from shared.federation.aggregation import AggregationResult, aggregate
from shared.federation.algorithms import algorithm_of
from shared.federation.optimizers import advance, initial_state, load_state
from shared.federation.sources import MemorySource
from shared.federation.update import Update, euclidean_norm
from shared.program import ProgramManifest
from simulation.arrivals import (
    Arrival,
    Arrivals,
    AsynchronousTraining,
    Population,
    ProgressCallback,
    run_synchronous_round,
)
from simulation.executors import Executor, results_in_order
from simulation.privacy import budget_objection, epsilon_spent
from simulation.randomness import entropy
from simulation.records import RoundRecord, Store, UploadBytes
from simulation.secure_aggregation import combine_masked
from simulation.settings import SimulationSettings
from simulation.shards import Shard
from simulation.uploads import member, receive, send

F32 = NDArray[np.float32]
DEVICES_PER_CALL = 16  # devices evaluated in one call


@dataclass(frozen=True)
class Outcome:
    """A round's aggregated update, or why there is none.

    masked_bytes: mean bytes sent by a device of a masked round.
    """

    combined: AggregationResult | None
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
        on_progress: ProgressCallback = lambda activity, done, total: None,
    ) -> None:
        """Resumes from the store's last round. on_progress: callback for progress."""
        self._settings, self._cohort, self._manifest = settings, settings.cohort, manifest
        self._shards, self._executor, self._store, self._on_progress = shards, executor, store, on_progress
        self._population, self._algorithm = Population(settings, shards), algorithm_of(settings.cohort.algorithm)
        self._asynchronous = AsynchronousTraining(
            self._population, executor, lambda version: store.adapter(version, manifest.size), on_progress
        )
        self.rounds = store.rounds()
        self.flat: F32 = np.zeros(manifest.size, np.float32)  # B (D,) of the latest version
        self._optimizer = initial_state(self._cohort.optimizer, manifest.size)
        if self.rounds:
            self.flat = store.adapter(len(self.rounds) - 1, manifest.size)
            self._optimizer = load_state(store.optimizer(len(self.rounds) - 1), self._cohort.optimizer, manifest.size)

    def run(self) -> list[RoundRecord]:
        """Runs all rounds. Returns their records; number 0 is the state before the first round."""
        if not self.rounds:
            self._save_round(Arrivals(), [], {}, Outcome(None, "nothing has been trained yet"), time.monotonic())
        while (number := len(self.rounds)) <= self._settings.rounds:
            start = time.monotonic()
            if (why := budget_objection(self._settings, self.rounds)) is not None:
                self._save_round(Arrivals(), [], {}, Outcome(None, why), start)
                continue
            arrivals = self._collect(number)
            updates, rejections = self._receive(arrivals.received, number)
            self._save_round(arrivals, updates, rejections, self._combine(updates, arrivals, number), start)
        return self.rounds

    def _collect(self, number: int) -> Arrivals:
        if not self._cohort.algorithm.asynchronous:
            return run_synchronous_round(self._population, self._executor, number, self.flat, self._on_progress)
        last = self.rounds[-1]
        return self._asynchronous.collect(
            number, Arrivals(in_progress=last.in_progress, started_count=last.started_count, clock=last.clock)
        )

    def _receive(self, arrivals: Iterable[Arrival], number: int) -> tuple[list[Update], dict[str, int]]:
        """Returns the accepted updates, and the reasons for rejected ones."""
        updates, rejections = [], Counter[str]()
        for arrival in arrivals:
            upload = send(arrival, self._cohort.upload, self._settings.seed, number)
            try:
                updates.append(receive(upload, self._cohort, self._algorithm))
            except InvalidUpload as error:
                rejections[error.detail] += 1
        # A device that finished twice is one member, whose later update counts.
        return list({update.member: update for update in updates}.values()), dict(rejections)

    def _combine(self, updates: list[Update], arrivals: Arrivals, number: int) -> Outcome:
        """Returns the round's aggregated update, or why there is none."""
        cohort = self._cohort
        if len(updates) < cohort.quorum:
            return Outcome(None, f"{len(updates)} updates were accepted; the quorum is {cohort.quorum}")
        if cohort.masking is not None:
            lost_updates, _ = self._receive(arrivals.lost, number)
            masked = combine_masked(cohort, self._manifest, number, updates, lost_updates, self._settings.seed)
            return Outcome(masked.combined, masked.why, masked.bytes_sent)
        noise = entropy(self._settings.seed, "members", number)
        return Outcome(aggregate(cohort, MemorySource(updates), entropy=noise))

    def _save_round(
        self,
        arrivals: Arrivals,
        updates: Sequence[Update],
        rejections: dict[str, int],
        outcome: Outcome,
        start: float,
    ) -> None:
        """Updates the adapter, evaluates it and stores the round."""
        combined = outcome.combined
        if combined is not None:
            self.flat, self._optimizer = advance(self._cohort.optimizer, self._optimizer, self.flat, combined.update)
        test_metrics, devices = self._measure()
        results = [arrival.output.result for arrival in arrivals.received if arrival.local_task.faults is None]
        poisoned_members = {member(device) for device in self._population.poisoned}
        counted_updates = updates if combined is not None else ()
        trained = [arrival.local_task.device for arrival in (*arrivals.received, *arrivals.lost)]
        record = RoundRecord(
            number=len(self.rounds),
            published=combined is not None,
            why=outcome.why,
            selected=arrivals.selected,
            trained=tuple(trained),
            dropped=arrivals.dropped,
            refused=rejections,
            counted=0 if combined is None else combined.count,
            poisoned=sum(update.member in poisoned_members for update in counted_updates),
            clipped=0 if combined is None else combined.clipped,
            mean_staleness=fmean(update.staleness for update in counted_updates) if counted_updates else 0.0,
            update_norm=0.0 if combined is None else euclidean_norm(combined.update),
            accuracy=test_metrics.accuracy,
            loss=test_metrics.loss,
            devices=devices,
            start_accuracy=_mean(
                [run_result.start_accuracy or run_result.zero_shot_accuracy for run_result in results]
            ),
            tuned_accuracy=_mean([run_result.tuned_accuracy for run_result in results]),
            bytes=_bytes(arrivals.received, outcome.masked_bytes),
            epsilon=epsilon_spent(self._settings, self.rounds, trained, combined is not None),
            in_progress=arrivals.in_progress,
            started_count=arrivals.started_count,
            clock=arrivals.clock,
            b_sha256=sha256_hex(self.flat.astype("<f4").tobytes()),
            seconds=time.monotonic() - start,
        )
        self._store.save(record, self.flat, self._optimizer.dump())
        self.rounds.append(record)

    def _measure(self) -> tuple[SplitMetrics, dict[int, float]]:
        """Evaluates B on the test examples and on the held-out examples of the selected devices."""
        pending_test = self._executor.submit("test", self.flat)
        selected = range(min(self._settings.devices, self._settings.measured))
        shards = [self._shards[device].held_out for device in selected]
        groups = [tuple(shards[start : start + DEVICES_PER_CALL]) for start in range(0, len(shards), DEVICES_PER_CALL)]
        group_metrics = results_in_order(
            self._executor, "measure", ((self.flat, shard_group) for shard_group in groups)
        )
        metrics = [each for group in group_metrics for each in group]
        test_metrics: SplitMetrics = pending_test.result()
        return test_metrics, {device: each.accuracy for device, each in zip(selected, metrics, strict=True)}


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return fmean(measured) if measured else None


def _bytes(arrivals: Sequence[Arrival], masked: float) -> UploadBytes:
    if not arrivals:
        return UploadBytes()
    return UploadBytes(
        weights=fmean(len(arrival.output.adapter) for arrival in arrivals),
        trajectory=fmean(len(arrival.output.ledger) for arrival in arrivals),
        masked=masked,
    )
