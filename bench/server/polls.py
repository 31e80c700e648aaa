"""`bench server`, polls: devices that wait for jobs with long-polls and send heartbeats, and one server process.

On SQLite and on PostgreSQL, both as durable as they ship. The time until a device gets a job counts from the moment at
which its request could be answered: from the submission's first byte, which is before the job exists. The load is
`bench.server.load`.
"""

import json
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bench.result import Measurement, Row
from bench.runner import peak_memory
from bench.server import home
from server.settings import Settings
from shared.access import Role
from tests.server.actors import Actor

STEPS = 2  # heartbeats of a lease
CAPABILITIES = {"backends": ["xnnpack", "portable"], "engines": ["native"], "executorch": "1.5.1"}


class LoadSettings(BaseModel):
    """Settings of the load. jobs: number of jobs; None: until the line `enough`. rate: jobs per second. abandon_share:
    share of leases that a device abandons. jobs_per_recipe: number of jobs that share a program."""

    url: str
    app: str
    devices: list[home.Credentials]
    jobs: int | None = None
    rate: float = 5.0
    wait_seconds: float = 0.0
    heartbeat_seconds: float = 0.05
    ramp_seconds: float = 0.0
    abandon_share: float = 0.0
    retry: bool = False
    jobs_per_recipe: int | None = None

    def job(self, number: int) -> dict[str, Any]:
        """Returns the body of one job."""
        if self.jobs_per_recipe is None:
            return home.job(number)
        recipe = home.RECIPE | {"a_seed": number // self.jobs_per_recipe}
        return home.job(number, recipe, priority=number % 3)


def start_load(load_settings: LoadSettings) -> "subprocess.Popen[str]":
    """Starts the load in a process of its own and waits until it is ready."""
    command = [sys.executable, "-m", "bench.server.load"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(load_settings.model_dump_json() + "\n")
    process.stdin.flush()
    if process.stdout.readline() != "ready\n":
        raise SystemExit("the load did not start")
    return process


DEVICES, SECONDS, RATE = 500, 60.0, 5.0  # jobs a second
QUICK_DEVICES, QUICK_SECONDS = 100, 10.0
WAIT_SECONDS, HEARTBEAT_SECONDS = 20.0, 5.0
CLAIMED_REQUESTS = ("job to a device", "heartbeat", "submission")
DURABLE_SETTINGS = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on", "autovacuum": "on"}


def measure(quick: bool) -> Measurement:
    """Returns rows of each kind of request on each database; the claims are the worse of both."""
    rows: list[Row] = []
    devices, seconds = (QUICK_DEVICES, QUICK_SECONDS) if quick else (DEVICES, SECONDS)
    load_settings = {
        "wait_seconds": WAIT_SECONDS,
        "heartbeat_seconds": HEARTBEAT_SECONDS,
        "ramp_seconds": WAIT_SECONDS / 2,
    }
    with tempfile.TemporaryDirectory() as name, home.both_databases("polls", **DURABLE_SETTINGS) as databases:
        for kind, url in databases:
            settings = home.make_home(Path(name) / kind, database_url=url)
            rows += poll(settings, kind, devices, jobs=round(seconds * RATE), **load_settings)
    return rows, {
        "poll_p99_ms": max(row["p99_ms"] for row in rows if row["what"] in CLAIMED_REQUESTS),
        "poll_errors": float(sum(row["count"] for row in rows if row["what"] == "errors")),
        "server_rss_bytes": float(max(row["peak_rss_bytes"] for row in rows if row["what"] == "server")),
    }


def poll(settings: Settings, database: str, devices: int, **load_settings: float) -> list[Row]:
    """Runs the load once. load_settings: fields of LoadSettings."""
    token, credentials = home.new_token(settings, Role.APP), home.add_devices(settings, devices)
    with closing(home.ServerProcess(settings)) as server:
        with Actor(server.url, token) as app:  # compiles the only program
            first_job = home.submit(app, home.job(-1))
            app.post(f"/v1/jobs/{first_job['id']}/cancel").raise_for_status()
        load = start_load(LoadSettings(url=server.url, app=token, devices=credentials, **load_settings))
        output, _ = load.communicate()
        if load.returncode:
            raise SystemExit("the load failed")
        peak = peak_memory(server.process.pid)
    report = json.loads(output)
    columns = {"database": database, "devices": devices}
    rows = [
        columns | {"what": kind, **home.spread(times)} for kind, times in report["seconds"].items() if kind != "poll"
    ]
    errors = report["errors"]
    rows.append({"database": database, "what": "errors", "count": len(errors), "first": errors[:3]})
    rows.append({"database": database, "what": "server", "peak_rss_bytes": peak})
    return rows
