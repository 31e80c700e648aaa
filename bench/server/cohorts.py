"""`bench server`, cohorts: rounds of many cohorts of virtual devices against a real server, PostgreSQL and S3.

`mobizo-server run` with worker processes that open rounds, submit their members' jobs and aggregate their updates. Each
device (`bench.server.virtual`) is a member of one cohort. It speaks HTTP with a real token and signatures, and sends
random numbers instead of training. PostgreSQL is as durable as it ships; the S3 service is moto's, in a process of its
own. Server, database, S3 and load share the machine, so rows name each one's processor time.
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from sqlalchemy import func, insert, select

from bench.result import Measurement, Row, notes
from bench.runner import cpu_seconds, peak_memory
from bench.server import home
from bench.server.fleet import DURABLE_SETTINGS, add_fleet, growth, start_load, table_sizes, user_of
from bench.server.virtual import Phase
from server.database.columns import utc_now
from server.database.database import Database
from server.federation.models import Cohort, CohortMember, CohortRound
from server.identity.devices.repository import Device
from server.settings import Settings
from shared.access import Role
from shared.federation.cohort import RoundState
from tests.postgres import Postgres
from tests.server.homes import eventually
from tests.server.nginx import free_ports
from tests.server.s3 import Service

DEVICES, COHORTS, ROUNDS, SECONDS = 10_000, 100, 1, 2400.0  # rounds of each cohort; limit of the whole phase
QUICK_DEVICES, QUICK_COHORTS = 60, 3
WORKERS = 2
WAIT_SECONDS = 30.0  # of a poll, the longest that the server takes


def measure(quick: bool) -> Measurement:
    """Returns rows of the rounds, of each process, and of the growth of tables; claims rounds per hour and errors."""
    devices, count = (QUICK_DEVICES, QUICK_COHORTS) if quick else (DEVICES, COHORTS)
    postgres = Postgres(**DURABLE_SETTINGS).start()
    try:
        with tempfile.TemporaryDirectory() as name, _s3(Path(name)) as (storage, s3):
            settings = home.make_home(
                Path(name) / "server",
                database_url=postgres.create("cohorts"),
                engine="procrastinate",
                connections=devices + 100,
                address_connections=devices + 100,
                **storage,
            )
            others = {"PostgreSQL": psutil.Process(postgres.pid), "S3": s3}
            return rounds(settings, devices, count, others)
    finally:
        postgres.remove()


def rounds(
    settings: Settings,
    devices: int,
    count: int,
    others: dict[str, psutil.Process],
    rounds_each: int = ROUNDS,
    wait_seconds: float = WAIT_SECONDS,
) -> Measurement:
    """Leads `count` cohorts through their rounds. others: further processes whose processor time is reported."""
    token, credentials = home.new_token(settings, Role.APP), add_fleet(settings, devices)
    (port,) = free_ports(1)
    server = home.start_server(settings, port, WORKERS)
    try:
        url = home.wait_until_answers(settings, port, server)
        with home.client(url, token) as app:
            a_sha256 = _create_cohorts(app, count, rounds_each)
        with start_load(url, credentials) as load:
            sizes = table_sizes(settings)
            before = _processor_seconds(server, others)
            _add_members(settings, devices, count)
            total = devices * rounds_each
            phase = Phase(
                kind="round",
                requests=total,
                at_once=devices,
                seconds=SECONDS,
                wait_seconds=wait_seconds,
                a_sha256=a_sha256,
            )
            with _progress(settings, count * rounds_each):
                result = load.run(phase)
            _wait_for_rounds(settings, count * rounds_each)
            after = _processor_seconds(server, others)
        rows = [_rounds_row(settings, devices, count, result.errors)]
        rows += [
            {"what": "processor time", "process": name, "cpu_seconds": seconds - before[name]}
            for name, seconds in after.items()
        ]
        rows.append({"what": "server", "peak_rss_bytes": peak_memory(server.pid)})
        rows += growth("an update", sizes, table_sizes(settings), total)
    finally:
        server.terminate()
        server.wait(60)
    return rows, {
        "cohort_rounds_per_hour": rows[0]["rounds_per_hour"],
        "cohort_updates_per_second": rows[0]["updates_per_second"],
        "cohort_errors": float(rows[0]["errors"]),
    }


def _create_cohorts(app: httpx.Client, count: int, rounds_each: int) -> str:
    """Creates cohorts whose rounds wait for all members. Returns the fingerprint of their frozen A."""
    for number in range(count):
        body = {
            "name": f"cohort-{number}",
            "base": home.BASE,
            "task": "sst2",
            "dataset": home.DATASET,
            "recipe": {"estimator": "replay"} | home.RECIPE,
            "training": {"steps": 3},
            "automatic": True,
            "most_rounds": rounds_each,
        }
        view = app.post("/v1/cohorts", json=body).raise_for_status().json()
    return str(view["a_sha256"])


def _add_members(settings: Settings, devices: int, count: int) -> None:
    """Makes each device a member, by turns, in one transaction; the workers then open the first rounds."""
    database, now = Database(settings.url), utc_now()
    with database.writing() as session:
        numbers = session.scalars(select(Cohort.number).order_by(Cohort.number)).all()
        ids = {row.name: row.id for row in session.execute(select(Device.name, Device.id))}
        rows = [
            {
                "cohort_number": numbers[number % count],
                "user": user_of(number),
                "device_id": ids[f"device-{number}"],
                "joined_at": now,
            }
            for number in range(devices)
        ]
        session.execute(insert(CohortMember), rows)
    database.close()


def _published(database: Database) -> int:
    with database.reading() as session:
        query = select(func.count()).where(CohortRound.state == RoundState.PUBLISHED)
        return session.scalar(query) or 0


@contextmanager
def _progress(settings: Settings, total: int) -> Iterator[None]:
    """Prints the number of published rounds every ten seconds."""
    ended, database = threading.Event(), Database(settings.url)

    def report() -> None:
        while not ended.wait(10):
            notes.print(f"{_published(database)} of {total} rounds")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        database.close()


def _wait_for_rounds(settings: Settings, total: int) -> None:
    """Waits until the last updates are aggregated, or for a minute."""
    database, deadline = Database(settings.url), time.monotonic() + 60
    eventually(lambda: _published(database) >= total or time.monotonic() > deadline, 90)
    database.close()


def _rounds_row(settings: Settings, devices: int, count: int, errors: list[str]) -> Row:
    """Returns the published rounds, counted from the first one's opening to the last one's end."""
    database = Database(settings.url)
    with database.reading() as session:
        columns = (CohortRound.opened_at, CohortRound.ended_at, CohortRound.updates)
        published = session.execute(select(*columns).where(CohortRound.state == RoundState.PUBLISHED)).all()
        states = session.execute(select(CohortRound.state, func.count()).group_by(CohortRound.state)).all()
    database.close()
    if not published:
        raise SystemExit(f"no round was published within its time limit; the first errors: {errors[:3]}")
    seconds = (max(row.ended_at for row in published) - min(row.opened_at for row in published)).total_seconds()
    updates = sum(row.updates for row in published)
    return {
        "what": "rounds",
        "devices": devices,
        "cohorts": count,
        "workers": WORKERS,
        "published": len(published),
        "states": {str(state): number for state, number in states},
        "seconds": seconds,
        "rounds_per_hour": 3600 * len(published) / seconds,
        "updates": updates,
        "updates_per_second": updates / seconds,
        "errors": len(errors),
        "first": errors[:3],
    }


def _processor_seconds(server: psutil.Process, others: dict[str, psutil.Process]) -> dict[str, float]:
    """Returns the processor time so far of the server process, of its workers, and of other process trees."""
    own = cpu_seconds(server)
    trees = {name: _tree_seconds(process) for name, process in others.items()}
    return {"server": own, "workers": _tree_seconds(server) - own, **trees}


def _tree_seconds(process: psutil.Process) -> float:
    """Returns the processor time of a process, of its descendants, and of those that have ended."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        times = each.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url).status_code < 500
    return False


@contextmanager
def _s3(directory: Path) -> Iterator[tuple[dict[str, Any], psutil.Process]]:
    """Runs an S3 service; yields the server's settings for it, and its process."""
    (port,) = free_ports(1)
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "--port", str(port)]
    with (directory / "s3.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            endpoint = f"http://127.0.0.1:{port}"
            eventually(lambda: _answers(endpoint), home.TIMEOUT_SECONDS)
            service = Service(endpoint)
            yield service.settings(), psutil.Process(process.pid)
            service.client.close()
        finally:
            process.kill()
