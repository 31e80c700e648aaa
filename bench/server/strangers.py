"""`bench server`, strangers: an honest client's requests while strangers without a token attack the server.

The strangers hold idle connections and half-sent requests, and send bodies of the largest size that a JSON route and an
upload take. Once from one address, which meets the limit of an address; once from many, more than the server accepts in
all. The honest client has another address. It asks for `/healthz` and for a job, by turns, over one connection that it
keeps and over a new one for each request; a request that gets no response counts as an error.
"""

import json
import tempfile
import time
from collections import defaultdict
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from bench.result import Measured, Row
from bench.server.attack import Attack
from bench.server.home import client, job, make_home, new_token, peak_memory, running, submit
from bench.server.orders import start_process
from bench.server.polls import spread
from server.settings import Settings
from shared.access import Role

SECONDS, QUICK_SECONDS = 60.0, 12.0
GATHER_SECONDS = 5.0  # until all strangers are there
PAUSE = 0.02  # seconds between two requests of the honest client
PATIENCE = 10.0  # seconds; a request that takes longer is an error, and counts with this time
IDLE, HALF, BODIES = 1000, 1000, 100
MORE_THAN_ALL = 2.5  # times as many idle and half-sent connections meet the limit in all
ADDRESSES = {"one": 1, "many": 8}


def measure(quick: bool) -> Measured:
    """Returns rows of each kind of request without and with strangers; the claims are the worst with strangers."""
    seconds, rows = QUICK_SECONDS if quick else SECONDS, []
    with tempfile.TemporaryDirectory() as name:
        for addresses, number in ADDRESSES.items():
            settings = make_home(Path(name) / addresses)
            factor = MORE_THAN_ALL if number > 1 else 1
            rows += besieged(settings, addresses, number, (round(IDLE * factor), round(HALF * factor), BODIES), seconds)
    attacked = [row for row in rows if row["strangers"] and row["what"] != "server"]
    return rows, {
        "strangers_p99_ms": max(row["p99_ms"] for row in attacked),
        "strangers_errors": float(sum(row["errors"] for row in attacked)),
        "strangers_rss_bytes": float(max(row["peak_rss_bytes"] for row in rows if row["what"] == "server")),
    }


def besieged(
    settings: Settings, addresses: str, number: int, strangers: tuple[int, int, int], seconds: float
) -> list[Row]:
    """Runs a server alone and with strangers. strangers: idle and half-sent connections, and bodies."""
    token = new_token(settings, Role.APP)
    limits = {"json_bytes": settings.max_body_bytes, "upload_bytes": settings.upload_bytes}
    senders = [f"127.0.1.{last}" for last in range(1, number + 1)]
    with running(settings) as (url, server):
        with client(url, token) as app:
            path = f"/v1/jobs/{submit(app, job())['id']}"
        port = int(url.rpartition(":")[2])
        honest = Honest(port, token, ("/healthz", path))
        rows = honest.ask({"addresses": addresses, "strangers": 0}, seconds / 4)
        idle, half, bodies = strangers
        orders = Attack(port=port, addresses=senders, idle=idle, half=half, bodies=bodies, **limits)
        before = server.cpu_times()
        attack = start_process("bench.server.attack", orders)
        try:
            time.sleep(GATHER_SECONDS)
            rows += honest.ask({"addresses": addresses, "strangers": sum(strangers)}, seconds)
            after, peak = server.cpu_times(), peak_memory(server.pid)
        finally:
            did = json.loads(attack.communicate("\n")[0])
    rows.append(
        {
            "addresses": addresses,
            "what": "server",
            "strangers": sum(strangers),
            "peak_rss_bytes": peak,
            "cpu_seconds": after.user + after.system - before.user - before.system,
            **{name.replace(" ", "_"): number for name, number in sorted(did.items())},
        }
    )
    return rows


class Honest:
    """A client that asks for each path by turns, over a kept connection and over new ones."""

    def __init__(self, port: int, token: str, paths: tuple[str, str]) -> None:
        self._port, self._headers = port, {"Authorization": f"Bearer {token}"}
        self._what = dict(zip(paths, ("healthz", "job"), strict=True))
        self._kept: HTTPConnection | None = None

    def ask(self, about: Row, seconds: float) -> list[Row]:
        """Asks for so many seconds; returns a row of each kind of request."""
        times: dict[tuple[str, str], list[float]] = defaultdict(list)
        errors: dict[tuple[str, str], int] = defaultdict(int)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for path, what in self._what.items():
                for kind in ("kept", "new"):
                    began = time.monotonic()
                    try:
                        self._request(path, kind)
                    except (OSError, HTTPException):
                        errors[what, kind] += 1
                        times[what, kind].append(PATIENCE)
                    else:
                        times[what, kind].append(time.monotonic() - began)
                    time.sleep(PAUSE)
        return [
            {**about, "what": what, "connection": kind, "errors": errors[what, kind], **spread(times[what, kind])}
            for what in self._what.values()
            for kind in ("kept", "new")
        ]

    def _request(self, path: str, kind: str) -> None:
        """Raises OSError or HTTPException unless the response has status 200."""
        link = self._kept if kind == "kept" else None
        if link is None:
            link = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
            if kind == "kept":
                self._kept = link
        try:
            link.request("GET", path, headers=self._headers)
            response = link.getresponse()
            response.read()
            if response.status != 200:
                raise HTTPException(f"status {response.status}")
        except (OSError, HTTPException):
            self._close()
            raise
        finally:
            if kind == "new":
                link.close()

    def _close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None
