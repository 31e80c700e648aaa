"""Prometheus metrics of the scorer: batches, tokens, cached models and queue lengths. No label names a tenant."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from server.inference.frames import Batch

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WORKS = ("score", "read", "generate")  # read: prompts of texts to generate
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ScorerMeters:
    """Metrics of one server's scorer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        work = ("work",)
        self._tokens = Counter(
            "mobizo_scorer_tokens", "Tokens computed, padding included, by work", work, registry=registry
        )
        self._rows = Histogram(
            "mobizo_scorer_batch_rows", "Rows of each batch, by work", work, buckets=ROWS, registry=registry
        )
        self._adapters = Histogram(
            "mobizo_scorer_batch_adapters", "Different adapters of each batch", work, buckets=ROWS, registry=registry
        )
        self._seconds = Histogram(
            "mobizo_scorer_batch_seconds", "Time of each batch, by work", work, buckets=SECONDS, registry=registry
        )
        self._in_memory = Gauge("mobizo_scorer_held", "Adapters and base models in memory", ("of",), registry=registry)
        self._in_memory_bytes = Gauge("mobizo_scorer_held_bytes", "Memory of these", ("of",), registry=registry)
        self._evicted = Counter(
            "mobizo_scorer_evictions", "Evicted adapters and base models", ("of",), registry=registry
        )
        self._waiting = Gauge("mobizo_scorer_waiting_texts", "Texts in the scorer's queue", registry=registry)
        self._generating = Gauge("mobizo_scorer_generating_texts", "Texts being generated", registry=registry)
        self._rss = Gauge("mobizo_scorer_resident_bytes", "Resident memory of the scorer", registry=registry)
        self._starts = Counter("mobizo_scorer_starts", "Starts of the scorer process", registry=registry)
        for each in WORKS:
            for family in (self._tokens, self._rows, self._adapters, self._seconds):
                family.labels(each)
        self._counted_evictions = {"adapters": 0, "bases": 0}  # evictions already counted for this scorer process
        for of in self._counted_evictions:
            self._evicted.labels(of)
        self.scorer_stopped()

    def started(self) -> None:
        """Records that a scorer process was started."""
        self._starts.inc()
        self._counted_evictions = {"adapters": 0, "bases": 0}
        self.scorer_stopped()

    def scorer_stopped(self) -> None:
        """Records that the scorer process is gone."""
        for of in self._counted_evictions:
            self._in_memory.labels(of).set(0)
            self._in_memory_bytes.labels(of).set(0)
        for gauge in (self._waiting, self._generating, self._rss):
            gauge.set(0)

    def ran(self, batch: Batch) -> None:
        """Records a batch."""
        self._tokens.labels(batch.work).inc(batch.tokens)
        self._rows.labels(batch.work).observe(batch.rows)
        self._adapters.labels(batch.work).observe(batch.adapters)
        self._seconds.labels(batch.work).observe(batch.seconds)
        for of, count, size, evicted in (
            ("adapters", batch.held_adapters, batch.held_adapter_bytes, batch.evicted_adapters),
            ("bases", batch.held_bases, batch.held_base_bytes, batch.evicted_bases),
        ):
            self._in_memory.labels(of).set(count)
            self._in_memory_bytes.labels(of).set(size)
            self._evicted.labels(of).inc(evicted - self._counted_evictions[of])
            self._counted_evictions[of] = evicted
        self._waiting.set(batch.waiting_texts)
        self._generating.set(batch.generating_texts)
        self._rss.set(batch.rss_bytes)
