"""Lists, leases and claims among 10,000 jobs in every state, on both databases: how long each takes.

Each is one transaction, timed whole: connection, statements and objects. The claim is the slowest lease or list.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from bench.server_population import (
    JOBS,
    TENANTS,
    datasets_of,
    device_id,
    populate,
    tenant_of,
)
from server.clock import utc_now
from server.db.database import Database
from server.db.paging import PageRequest
from server.db.schema import upgrade
from server.jobs.repository import JobFilter, JobRepository
from server.leases.models import JobLease
from server.leases.repository import LeaseRepository
from server.leases.service import LeaseService
from server.programs.waiting import WaitingRepository
from server.queue.repository import QueueRepository
from shared.job import JobState, Progress
from shared.protocol import LeaseRequest
from tests.postgres import Postgres

TIMES, QUICK_TIMES, QUICK_JOBS = 300, 40, 2000
LEASE_SECONDS = 3600.0
SEED = 7
Row = dict[str, Any]
Query = Callable[[Session, random.Random, int], object]


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    """A row for each query on each database, and the worst p95 of lists and of leases, ms."""
    number, times = (QUICK_JOBS, QUICK_TIMES) if quick else (JOBS, TIMES)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        postgres = Postgres().start()
        try:
            for kind, url in (
                ("sqlite", f"sqlite:///{Path(name) / 'queries.sqlite3'}"),
                ("postgresql", postgres.create("queries")),
            ):
                rows += [{"database": kind, **row} for row in _measure(url, number, times)]
        finally:
            postgres.remove()
    return rows, {
        "list_p95_ms": max(row["p95_ms"] for row in rows if row["query"].startswith("list")),
        "lease_p95_ms": max(row["p95_ms"] for row in rows if row["query"].startswith("lease")),
    }


def _measure(url: str, number: int, times: int) -> list[Row]:
    database = Database(url)
    upgrade(database.engine)
    busy = populate(database, number)
    held = _held(database)
    queries: list[tuple[str, bool, Query]] = [
        *((f"list {_named(chosen)}", False, _list(chosen)) for chosen in _filters()),
        ("lease: is there work", False, lambda session, rng, _: _look(session, busy + rng.randrange(busy))),
        ("lease: the one it has", True, lambda session, rng, _: _acquire(session, rng.randrange(busy))),
        # Each time another device: whoever has a job asks for no other.
        ("lease: a new one", True, lambda session, _, turn: _acquire(session, busy + turn)),
        ("lease: heartbeat", True, lambda session, rng, turn: _heartbeat(session, rng.randrange(busy), turn, held)),
        ("claim: is there any", False, lambda session, *_: WaitingRepository(session).any(utc_now())),
        ("claim: the next", True, lambda session, *_: WaitingRepository(session).next(utc_now())),
    ]
    rows = [_time(database, name, writes, query, times, number) for name, writes, query in queries]
    database.close()
    return rows


def _time(database: Database, name: str, writes: bool, query: Query, times: int, number: int) -> Row:
    rng, seconds = random.Random(SEED), []
    for turn in range(times):
        began = time.perf_counter()
        with database.writing() if writes else database.reading() as session:
            query(session, rng, turn)
        seconds.append(time.perf_counter() - began)
    p50, p95, p99 = (1000 * float(value) for value in np.percentile(seconds, (50, 95, 99)))
    return {"query": name, "jobs": number, "times": times, "p50_ms": p50, "p95_ms": p95, "p99_ms": p99}


def _filters() -> list[JobFilter]:
    return [
        JobFilter(),
        JobFilter(state=JobState.READY),
        JobFilter(user="user-3"),
        JobFilter(adapter="user-3-1"),
        JobFilter(state=JobState.FAILED, user="user-3"),
    ]


def _named(chosen: JobFilter) -> str:
    return " and ".join(name for name in ("state", "user", "adapter") if getattr(chosen, name)) or "all"


def _list(chosen: JobFilter) -> Query:
    def query(session: Session, rng: random.Random, turn: int) -> object:
        page = PageRequest(rng.choice((None, rng.randrange(JOBS))), 50)
        return JobRepository(session).page(tenant_of(rng.randrange(TENANTS)), page, chosen).rows

    return query


def _asking(session: Session, device: int, lock: bool) -> Any:
    request = LeaseRequest(datasets=list(datasets_of(device)))
    return LeaseService(session, LEASE_SECONDS).asking(tenant_of(device), device_id(device), request, lock)


def _look(session: Session, device: int) -> object:
    """What a device's request costs before there is a job for it."""
    asking = _asking(session, device, lock=False)
    return LeaseRepository(session).overdue(utc_now()), QueueRepository(session).heads(asking)


def _acquire(session: Session, device: int) -> None:
    lease = LeaseService(session, LEASE_SECONDS).acquire(_asking(session, device, lock=True))
    if lease is None:
        raise RuntimeError(f"device {device} got no job")


def _heartbeat(session: Session, device: int, turn: int, held: dict[str, str]) -> None:
    progress = Progress(phase="training", step=turn, steps=1000)
    LeaseService(session, LEASE_SECONDS).heartbeat(device_id(device), held[device_id(device)], progress)


def _held(database: Database) -> dict[str, str]:
    """The lease of each device that has one."""
    with database.reading() as session:
        rows = session.execute(select(JobLease.device_id, JobLease.id).where(JobLease.ending.is_(None)))
        return {row.device_id: row.id for row in rows}
