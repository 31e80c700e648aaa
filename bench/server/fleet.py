"""`bench server`, fleet: what each kind of a device's request costs the server process, and how many it answers.

The devices are virtual (`bench.server.virtual`): they speak HTTP with real tokens and signatures and train nothing.
Each phase is one kind of request at saturation, with a few requests in flight at a time, over connections that are open
as those of devices that wait are; what a new connection costs has its own row. The processor time is that of the server
process alone, with the database in it where it is SQLite. Each device has one user of its own, as fleets do.
"""

import base64
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import insert, text

from bench.result import Measurement, Row
from bench.runner import cpu_seconds, peak_memory
from bench.server import home
from bench.server.virtual import FleetSettings, Phase, PhaseResult
from server.database.columns import new_id, utc_now
from server.database.database import Database
from server.identity.devices.repository import Device, DeviceUser, LabelSet
from server.identity.tokens import Token, new_token, token_digest
from server.settings import Settings
from shared.access import DEFAULT_TENANT, Role, Scope
from shared.signing import new_private_key, private_bytes, public_text

DEVICES, QUICK_DEVICES = 2000, 100
PROCESSES, CONCURRENCY = 2, 32  # of the load; requests in flight of all processes together
WAIT_SECONDS, LONG_POLL_SECONDS = 20.0, 30.0  # of a long poll; how long the whole fleet waits
DURABLE_SETTINGS = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on", "autovacuum": "on"}
# A device's life, in this order: it finds no job, waits for one, gets one, trains, restarts, and gives the job back.
REQUEST_KINDS = ("poll", "long poll", "acquire", "heartbeat", "leave", "release")
TableSizes = dict[str, tuple[int, int]]  # rows and bytes by table


def measure(quick: bool) -> Measurement:
    """Returns a row of each kind of request on each database; the claim is the costliest kind of a request."""
    rows: list[Row] = []
    devices = QUICK_DEVICES if quick else DEVICES
    limits: dict[str, Any] = {"connections": devices + 100, "address_connections": devices + 100}
    with tempfile.TemporaryDirectory() as name, home.both_databases("fleet", **DURABLE_SETTINGS) as databases:
        for kind, url in databases:
            settings = home.make_home(Path(name) / kind, database_url=url, **limits)
            rows += [{"database": kind, "devices": devices, **row} for row in fleet(settings, devices, quick)]
    return rows, {"request_milliseconds": max(row["cpu_ms"] for row in rows if row["what"] in REQUEST_KINDS)}


def fleet(settings: Settings, count: int, quick: bool = False) -> list[Row]:
    """Leads a fleet through the life of its devices; returns a row of each kind of request and of each table."""
    token, empty_sizes = home.new_token(settings, Role.APP), table_sizes(settings)
    devices = add_fleet(settings, count)
    enrolled_sizes = table_sizes(settings)
    rows = growth("a device enrolls", empty_sizes, enrolled_sizes, count)
    with home.running_server(settings) as (url, server), start_load(url, devices) as load:
        load.run(Phase(kind="poll", requests=count, at_once=CONCURRENCY))  # connects, and compiles the statements
        for kind in REQUEST_KINDS:
            if kind == "acquire":
                rows.append(_submit(url, token, server, count))
                submitted_sizes = table_sizes(settings)
                rows += growth("a job is submitted", enrolled_sizes, submitted_sizes, count)
                # What was idle for 30 seconds is closed by now; devices that wait are never idle for so long.
                rows.append({"what": "connect", **_measure_phase(load, server, _phase("connect", count, quick))})
            rows.append({"what": kind, **_measure_phase(load, server, _phase(kind, count, quick))})
        rows += growth("a job is trained", submitted_sizes, table_sizes(settings), count)
        rows.append({"what": "server", "peak_rss_bytes": peak_memory(server.pid)})
    return rows


def user_of(number: int) -> str:
    """Returns the only user of a device of a fleet."""
    return f"member-{number}"


def add_fleet(settings: Settings, count: int) -> list[home.Credentials]:
    """Enrolls many devices directly in the database, in bulk, each with a user of its own."""
    database, now, credentials = Database(settings.url), utc_now(), []
    devices, users, tokens = [], [], []
    for number in range(count):
        key, token, device_id = new_private_key(), new_token(Role.DEVICE), new_id("device")
        columns = {"tenant": DEFAULT_TENANT, "name": f"device-{number}", "created_at": now}
        public = public_text(key.public_key())
        devices.append({"id": device_id, "public_key": public, "platform": "linux", "labels": LabelSet({})} | columns)
        users.append({"device_id": device_id, "user": user_of(number), "bound_at": now})
        digest, scopes = token_digest(token), frozenset[Scope]()
        role_columns = {
            "id": new_id("token"),
            "digest": digest,
            "role": Role.DEVICE,
            "scopes": scopes,
            "device_id": device_id,
        }
        tokens.append(role_columns | columns)
        credentials.append(home.Credentials(token, base64.b64encode(private_bytes(key)).decode()))
    with database.writing() as session:
        for table, rows in ((Device, devices), (DeviceUser, users), (Token, tokens)):
            session.execute(insert(table), rows)
    database.close()
    return credentials


class Load:
    """The load's processes."""

    def __init__(self, processes: list["subprocess.Popen[str]"]) -> None:
        self._processes = processes

    def run(self, phase: Phase) -> PhaseResult:
        """Runs a phase in all processes, which share its requests; returns their joint result."""
        share = len(self._processes)
        part = phase.model_copy(update={"requests": phase.requests // share, "at_once": phase.at_once // share})
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(part.model_dump_json() + "\n")
            process.stdin.flush()
        result = PhaseResult()
        for process in self._processes:
            assert process.stdout is not None
            part_result = PhaseResult.model_validate_json(process.stdout.readline())
            result.seconds += part_result.seconds
            result.errors += part_result.errors
        return result


def _phase(kind: str, count: int, quick: bool) -> Phase:
    if kind == "long poll":
        seconds = LONG_POLL_SECONDS / (3 if quick else 1)
        return Phase(kind="poll", requests=10**9, at_once=count, seconds=seconds, wait_seconds=WAIT_SECONDS)
    return Phase(kind=kind, requests=2 * count if kind == "heartbeat" else count, at_once=CONCURRENCY)


def _measure_phase(load: Load, server: psutil.Process, phase: Phase) -> Row:
    cpu, start = cpu_seconds(server), time.monotonic()
    result = load.run(phase)
    seconds, cpu = time.monotonic() - start, cpu_seconds(server) - cpu
    count = len(result.seconds)
    rates = {"requests_per_second": count / seconds, "cpu_ms": 1000 * cpu / count, "cpu_share": cpu / seconds}
    return {**rates, **home.spread(result.seconds), "errors": len(result.errors), "first": result.errors[:1]}


def _submit(url: str, token: str, server: psutil.Process, count: int) -> Row:
    """Submits one job for each device's user."""
    with home.client(url, token) as app:
        first_job = home.submit(app, home.job(-1))  # compiles the only program
        app.post(f"/v1/jobs/{first_job['id']}/cancel").raise_for_status()
        cpu, start = cpu_seconds(server), time.monotonic()
        for number in range(count):
            app.post("/v1/jobs", json=home.job(number, user=user_of(number))).raise_for_status()
        seconds, cpu = time.monotonic() - start, cpu_seconds(server) - cpu
    return {"what": "submission", "requests_per_second": count / seconds, "app_cpu_ms": 1000 * cpu / count}


@contextmanager
def start_load(url: str, devices: list[home.Credentials]) -> Iterator[Load]:
    processes = []
    for first in range(PROCESSES):
        command = [sys.executable, "-m", "bench.server.virtual"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        settings = FleetSettings(port=int(url.rpartition(":")[2]), devices=devices[first::PROCESSES])
        process.stdin.write(settings.model_dump_json() + "\n")
        process.stdin.flush()
        processes.append(process)
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield Load(processes)
    finally:
        for process in processes:
            with process:  # closes its pipes and waits for it
                process.kill()


def table_sizes(settings: Settings) -> TableSizes:
    """Returns rows, and bytes with indexes, of each table."""
    database = Database(settings.url)
    query = "SELECT tbl_name, sum(pgsize) FROM dbstat JOIN sqlite_schema USING (name) GROUP BY 1"
    if database.engine.dialect.name == "postgresql":
        query = "SELECT relname, pg_total_relation_size(relid) FROM pg_stat_user_tables WHERE schemaname = 'public'"
    with database.engine.connect() as connection:
        sizes = {
            name: (connection.execute(text(f'SELECT count(*) FROM "{name}"')).scalar_one(), int(size))
            for name, size in connection.execute(text(query)).all()
        }
    database.close()
    return sizes


def growth(event: str, before: TableSizes, after: TableSizes, count: int) -> list[Row]:
    """Returns a row of each table that grew, with what one of `count` events added to it."""
    growth = {name: (rows - before[name][0], size - before[name][1]) for name, (rows, size) in after.items()}
    return [
        {"what": event, "table": name, "rows": rows / count, "bytes": size / count}
        for name, (rows, size) in sorted(growth.items())
        if rows or size >= count
    ]
