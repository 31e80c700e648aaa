"""Prometheus metrics of the scorer. No label names a tenant."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
WORKS = ("score", "read", "generate")  # read: prompts of texts to generate


class ScorerMeters:
    """Metrics of one server's scorer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"mobizo_scorer_batch_{name}", text, ("work",), buckets=buckets, registry=registry)

        self._rows = histogram("rows", "Rows of each batch, by work", ROWS)
        self._adapters = histogram("adapters", "Different adapters of each batch, by work", ROWS)
        self._seconds = histogram("seconds", "Time of each batch, by work", SECONDS)
        self._tokens = Counter("mobizo_scorer_tokens", "Tokens computed, with padding", ("work",), registry=registry)
        self._resident = Gauge("mobizo_scorer_resident_bytes", "Resident memory of the scorer", registry=registry)
        self.waiting = Gauge("mobizo_scorer_waiting_tokens", "Tokens of unanswered requests", registry=registry)
        self.starts = Counter("mobizo_scorer_starts", "Starts of the scorer process", registry=registry)
        for work in WORKS:
            for family in (self._rows, self._adapters, self._seconds, self._tokens):
                family.labels(work)

    def count(self, work: str, rows: int, tokens: int, adapters: int, seconds: float, resident_bytes: int) -> None:
        """Records a batch. tokens: computed, with padding. adapters: different ones."""
        self._rows.labels(work).observe(rows)
        self._adapters.labels(work).observe(adapters)
        self._seconds.labels(work).observe(seconds)
        self._tokens.labels(work).inc(tokens)
        self._resident.set(resident_bytes)
