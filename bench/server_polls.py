"""`bench server`, polls: devices that wait for jobs with long-polls and send heartbeats, and one server process.

On SQLite and on PostgreSQL, both as durable as they ship. What a device waits for a job is counted from the moment its
request could be answered: from the submission's first byte, which is before the job is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.poll_clients import WARM_UP, Orders
from bench.postgres import postgres
from bench.server_home import DATASET, fill, request, running
from server.settings import Settings

DEVICES, SECONDS, RATE = 500, 60.0, 5.0  # jobs a second
QUICK_DEVICES, QUICK_SECONDS = 100, 10.0
ANSWERED = ("job to a device", "heartbeat", "submission")  # what the claim is about

Row = dict[str, Any]


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    """Rows of each kind of request on each database, and the claims: the worst of both."""
    rows: list[Row] = []
    devices, seconds = (QUICK_DEVICES, QUICK_SECONDS) if quick else (DEVICES, SECONDS)
    for database in ("sqlite", "postgresql"):
        with tempfile.TemporaryDirectory() as name, postgres() if database == "postgresql" else nullcontext() as url:
            rows += poll(Settings(home=Path(name) / "home", database_url=url), database, devices, seconds)
    return rows, {
        "poll_p99_ms": max(row["p99_ms"] for row in rows if row["what"] in ANSWERED),
        "poll_errors": float(sum(row["count"] for row in rows if row["what"] == "errors")),
        "server_rss_bytes": float(max(row["peak_rss_bytes"] for row in rows if row["what"] == "server")),
    }


def poll(settings: Settings, database: str, devices: int, seconds: float) -> list[Row]:
    """One run."""
    app, credentials = fill(settings, devices)
    with running(settings) as (url, server):
        place = urlsplit(url)
        orders = Orders(
            host=place.hostname or "",
            port=place.port or 0,
            rate=RATE,
            dataset=DATASET,
            app=app,
            jobs=[request(number).model_dump(mode="json") for number in range(WARM_UP + round(seconds * RATE))],
            devices=[(device.token, device.key) for device in credentials],
        )
        before = server.cpu_times()
        done = subprocess.run(
            [sys.executable, "-m", "bench.poll_clients"], input=orders.model_dump_json(), capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SystemExit(f"the clients ended: {done.stderr[-2000:]}")
        after = server.cpu_times()
        peak = peak_rss(server.pid)
    told = json.loads(done.stdout)
    rows: list[Row] = [
        {"database": database, "devices": devices, "what": what, **spread(found)}
        for what, found in told["seconds"].items()
    ]
    spent = after.user + after.system - before.user - before.system
    errors = told["errors"]
    rows.append({"database": database, "what": "errors", "count": len(errors), "first": errors[:3]})
    rows.append({"database": database, "what": "server", "peak_rss_bytes": peak, "cpu_seconds": spent})
    return rows


def spread(seconds: list[float]) -> Row:
    """How many, and milliseconds that half, 99 % and all of them took at most."""
    half, most, longest = (1000 * float(value) for value in np.quantile(seconds, (0.5, 0.99, 1.0)))
    return {"count": len(seconds), "p50_ms": half, "p99_ms": most, "max_ms": longest}


def peak_rss(process: int) -> int:
    """The most resident memory that a process has had, bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
