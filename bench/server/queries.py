"""`bench server`, queries: lists and leases among 10,000 jobs in every state, on both databases.

Each is one transaction, timed whole: connection, statements and objects. The claims are the slowest list and lease.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from bench.result import Measurement, Row
from bench.server.home import both_databases, spread
from server.database.columns import utc_now
from server.database.database import Database
from server.database.paging import PageRequest
from server.database.schema import upgrade
from server.jobs.leases.giving import LeaseGiving
from server.jobs.leases.repository import JobLease, LeaseRepository
from server.jobs.leases.service import LeaseService
from server.jobs.repository import JobFilter, JobRepository
from server.jobs.scheduling.matching import DeviceOffer
from server.jobs.scheduling.repository import QueueRepository
from server.wiring import wire
from shared.job import JobState, Progress
from shared.protocol import LeaseRequest
from tests.server.database.population import JOBS, TENANTS, datasets_of, device_id, populate, tenant_of

QUICK_JOBS, TIMES, QUICK_TIMES = 2000, 300, 40
LEASE_SECONDS, SEED = 3600.0, 7
Query = Callable[[Session, random.Random, int], object]


def measure(quick: bool) -> Measurement:
    """Returns a row for each query on each database, and the worst p95 of lists and of leases, ms."""
    wire()
    number, times = (QUICK_JOBS, QUICK_TIMES) if quick else (JOBS, TIMES)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, both_databases("queries") as databases:
        for kind, url in databases:
            query_rows = _measure(url or f"sqlite:///{Path(name) / 'queries.sqlite3'}", number, times)
            rows += [{"database": kind, **row} for row in query_rows]
    return rows, {
        "list_p95_ms": max(row["p95_ms"] for row in rows if row["query"].startswith("list")),
        "lease_p95_ms": max(row["p95_ms"] for row in rows if row["query"].startswith("lease")),
    }


def _measure(url: str, number: int, times: int) -> list[Row]:
    database = Database(url)
    upgrade(database.engine)
    busy_devices = populate(database, number)
    with database.reading() as session:
        leases = session.execute(select(JobLease.device_id, JobLease.id).where(JobLease.ending.is_(None)))
        lease_ids = {row.device_id: row.id for row in leases}
    filters = {
        "all": JobFilter(),
        "state": JobFilter(state=JobState.READY),
        "user": JobFilter(user="user-3"),
        "adapter": JobFilter(adapter="user-3-1"),
        "state and user": JobFilter(state=JobState.FAILED, user="user-3"),
    }
    queries: list[tuple[str, bool, Query]] = [
        *((f"list {name}", False, _list(job_filter, number)) for name, job_filter in filters.items()),
        (
            "lease: is there work",
            False,
            lambda session, rng, _: _poll(session, busy_devices + rng.randrange(busy_devices)),
        ),
        ("lease: the one it has", True, lambda session, rng, _: _acquire(session, rng.randrange(busy_devices))),
        # Another device each time, since a device with a job gets no other job.
        ("lease: a new one", True, lambda session, _, turn: _acquire(session, busy_devices + turn)),
        (
            "lease: heartbeat",
            True,
            lambda session, rng, turn: _heartbeat(session, rng.randrange(busy_devices), turn, lease_ids),
        ),
    ]
    rows = []
    for name, writes, query in queries:
        rng, seconds = random.Random(SEED), []
        for turn in range(times):
            start = time.perf_counter()
            with database.writing() if writes else database.reading() as session:
                query(session, rng, turn)
            seconds.append(time.perf_counter() - start)
        rows.append({"query": name, "jobs": number, **spread(seconds)})
    database.close()
    return rows


def _list(filters: JobFilter, number: int) -> Query:
    def query(session: Session, rng: random.Random, turn: int) -> object:
        page = PageRequest(rng.choice((None, rng.randrange(number))), 50)
        return JobRepository(session).page(tenant_of(rng.randrange(TENANTS)), page, filters).rows

    return query


def _offer(session: Session, device: int, lock: bool) -> DeviceOffer:
    request = LeaseRequest(datasets=list(datasets_of(device)))
    return LeaseGiving(session, LEASE_SECONDS).offer(tenant_of(device), device_id(device), request, lock)


def _poll(session: Session, device: int) -> object:
    """Runs the database queries of one lease request that finds no job."""
    offer = _offer(session, device, lock=False)
    return LeaseRepository(session).overdue(utc_now()), QueueRepository(session).heads(offer)


def _acquire(session: Session, device: int) -> None:
    if LeaseGiving(session, LEASE_SECONDS).acquire(_offer(session, device, lock=True)) is None:
        raise RuntimeError(f"device {device} got no job")


def _heartbeat(session: Session, device: int, turn: int, lease_ids: dict[str, str]) -> None:
    progress = Progress(phase="training", step=turn, steps=1000)
    LeaseService(session, LEASE_SECONDS).heartbeat(device_id(device), lease_ids[device_id(device)], progress)
