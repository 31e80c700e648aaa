"""The services and metrics that routes of jobs share in one process; `AppState.get` makes each service once."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge
from sqlalchemy.orm import Session

from server.clock import utc_now
from server.database.write_queue import GroupCommit
from server.jobs.leases.repository import LeaseRepository
from server.jobs.leases.service import Heartbeat, LeaseService
from server.jobs.scheduling.long_poll import LongPoll
from server.web.state import AppState
from shared.protocol import LeaseState


def make_long_poll(state: AppState) -> LongPoll:
    """Makes the long poll of devices that wait for a job. Overdue leases are taken back before each poll."""

    def take_back_overdue() -> None:
        with state.database.reading() as session:
            if not LeaseRepository(session).overdue(utc_now()):
                return
        with state.database.writing() as session:
            LeaseService(session, state.settings.lease_seconds, state.settings.lease_attempts).take_back_overdue()

    return LongPoll(state.database, state.shutdown, state.settings.look_seconds, take_back_overdue)


def make_heartbeats(state: AppState) -> GroupCommit[Heartbeat, LeaseState]:
    """Makes the group commit of heartbeats."""

    def write(session: Session, heartbeats: Sequence[Heartbeat]) -> list[LeaseState | Exception]:
        return LeaseService(session, state.settings.lease_seconds).heartbeats(heartbeats)

    return GroupCommit(state.database, state.write_queue, write)


class JobMeters:
    """The metrics of jobs in one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.polls = Gauge("mobizo_polls_open", "Devices that wait here for a job", registry=registry)
        self._programs = Counter(
            "mobizo_program_requests",
            "Jobs submitted here, by whether their program was compiled already",
            ("cache",),
            registry=registry,
        )
        for cache in ("hit", "miss"):
            self._programs.labels(cache)

    def program_requested(self, ready: bool) -> None:
        """Counts a submitted job. ready: its program was compiled before."""
        self._programs.labels("hit" if ready else "miss").inc()
