"""What one server process counts by itself: requests, bytes and streams; features add instruments of their own.

A registry of its own for each application, so that two in one process do not mix. No label names a job, a device or a
tenant: their number has no bound.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector

Instruments = TypeVar("Instruments")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Meters:
    """One process's instruments."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        build = Gauge("mobizo_build_info", "What runs here; always 1", ("version", "python"), registry=self.registry)
        build.labels(version("mobizo"), ".".join(str(part) for part in sys.version_info[:3])).set(1)
        self._requests = Histogram(
            "mobizo_http_request_seconds",
            "From a request's head to its answer's, by route template and status class",
            ("method", "route", "status"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._received = Counter(
            "mobizo_http_received_bytes", "Bytes of requests' bodies", ("route",), registry=self.registry
        )
        self._sent = Counter("mobizo_http_sent_bytes", "Bytes of answers' bodies", ("route",), registry=self.registry)
        self._handed_over = Counter(
            "mobizo_files_handed_over_bytes",
            "Bytes of the files that nginx (accel) or the bucket (redirect) was left to send; a part counts as whole",
            ("by",),
            registry=self.registry,
        )
        for by in ("accel", "redirect"):
            self._handed_over.labels(by)
        self.running = Gauge("mobizo_http_requests_running", "Requests being answered", registry=self.registry)
        self.streams = Gauge("mobizo_event_streams_open", "Event streams being followed", registry=self.registry)
        self._parts: dict[object, Any] = {}
        self._lock = threading.Lock()

    def part(self, make: Callable[[CollectorRegistry], Instruments]) -> Instruments:
        """Returns the instruments of a feature; `make` makes them once, in this registry."""
        with self._lock:
            if make not in self._parts:
                self._parts[make] = make(self.registry)
            part: Instruments = self._parts[make]
            return part

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered. route: its template, "none" if nothing is there."""
        self._requests.labels(method if method in _METHODS else "other", route, f"{status // 100}xx").observe(seconds)

    def received(self, route: str, size: int) -> None:
        """Bytes of a request's body came."""
        if size:
            self._received.labels(route).inc(size)

    def sent(self, route: str, size: int) -> None:
        """Bytes of an answer's body go out."""
        if size:
            self._sent.labels(route).inc(size)

    def handed_over(self, by: str, size: int) -> None:
        """Another was left to send a file."""
        self._handed_over.labels(by).inc(size)
