"""`bench server`, strangers: an honest client's requests while strangers without a token attack the server.

The strangers hold idle connections and half-sent requests, and send bodies of the largest size that a JSON route and an
upload take; each connects again a second after it was disconnected. Once from one address, which meets the limit of an
address; once from many, more than the server accepts in all. The honest client has another address. It asks for
`/healthz` and for a job, by turns, over one connection that it keeps and over a new one for each request; a request
that gets no response counts as an error.
"""

import asyncio
import contextlib
import multiprocessing
import socket
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import product
from pathlib import Path
from typing import Any

from bench.result import Measurement, Row
from bench.runner import cpu_seconds, peak_memory
from bench.server.home import client, job, make_home, new_token, running_server, spread, submit
from server.settings import Settings
from shared.access import Role

SECONDS, QUICK_SECONDS = 60.0, 12.0
CONNECT_SECONDS = 5.0  # until all strangers are connected
PAUSE_SECONDS = 0.02  # between two requests of the honest client
TIMEOUT_SECONDS = 10.0  # a request that takes longer is an error, and counts with this time
IDLE_COUNT, HALF_SENT_COUNT, BODY_COUNT = 1000, 1000, 100
MORE_THAN_ALL = 2.5  # this factor makes idle and half-sent connections exceed the server's total limit
ADDRESSES = {"one": 1, "many": 8}
PIECE = b" " * (256 << 10)
HALF_SENT = b"POST /v1/jobs HTTP/1.1\r\nHost: strangers\r\nContent-Type: application/js"
RECONNECT_SECONDS = 1.0  # until a stranger that was disconnected connects again


def measure(quick: bool) -> Measurement:
    """Returns rows of each kind of request without and with strangers; the claims are the worst with strangers."""
    seconds, rows = QUICK_SECONDS if quick else SECONDS, []
    with tempfile.TemporaryDirectory() as name:
        for addresses, number in ADDRESSES.items():
            factor = MORE_THAN_ALL if number > 1 else 1
            strangers = {
                "idle": round(IDLE_COUNT * factor),
                "half": round(HALF_SENT_COUNT * factor),
                "bodies": BODY_COUNT,
            }
            server_rows = measure_attack(make_home(Path(name) / addresses), number, strangers, seconds)
            rows += [{"addresses": addresses, **row} for row in server_rows]
    attacked_rows = [row for row in rows if row["strangers"] and row["what"] != "server"]
    return rows, {
        "strangers_p99_ms": max(row["p99_ms"] for row in attacked_rows),
        "strangers_errors": float(sum(row["errors"] for row in attacked_rows)),
        "strangers_rss_bytes": float(max(row["peak_rss_bytes"] for row in rows if row["what"] == "server")),
    }


def measure_attack(settings: Settings, addresses: int, strangers: dict[str, int], seconds: float) -> list[Row]:
    """Runs a server alone and with strangers from some addresses. strangers: connections by kind."""
    token, spawn = new_token(settings, Role.APP), multiprocessing.get_context("spawn")
    with running_server(settings) as (url, server):
        with client(url, token) as app:
            paths = {"healthz": "/healthz", "job": f"/v1/jobs/{submit(app, job())['id']}"}
        port = int(url.rpartition(":")[2])
        rows = [{"strangers": 0, **row} for row in time_requests(port, token, paths, seconds / 4)]
        senders = tuple(f"127.0.1.{last}" for last in range(1, addresses + 1))
        attack = Attack(port, senders, strangers, settings.max_body_bytes, settings.upload_bytes)
        cpu_before, stop, results = cpu_seconds(server), spawn.Event(), spawn.Queue()
        process = spawn.Process(target=attack.run, args=(stop, results), daemon=True)
        process.start()
        try:
            time.sleep(CONNECT_SECONDS)
            rows += [
                {"strangers": sum(strangers.values()), **row} for row in time_requests(port, token, paths, seconds)
            ]
            cpu, peak = cpu_seconds(server) - cpu_before, peak_memory(server.pid)
        finally:
            stop.set()
            counts = results.get(timeout=TIMEOUT_SECONDS)
            process.join()
    columns = {"strangers": sum(strangers.values()), "what": "server", "peak_rss_bytes": peak, "cpu_seconds": cpu}
    return [*rows, columns | counts]


def time_requests(port: int, token: str, paths: dict[str, str], seconds: float) -> list[Row]:
    """Requests each path by turns for some seconds; returns a row for each kind of request. paths: by name."""
    connections = {kind: HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS) for kind in ("kept", "new")}
    times: dict[tuple[str, str], list[float]] = {pair: [] for pair in product(paths, connections)}
    errors: Counter[tuple[str, str]] = Counter()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for (path_name, kind), durations in times.items():
            connection, start = connections[kind], time.monotonic()
            try:
                # Connects if needed.
                connection.request("GET", paths[path_name], headers={"Authorization": f"Bearer {token}"})
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    raise HTTPException(f"status {response.status}")
                durations.append(time.monotonic() - start)
            except (OSError, HTTPException):
                errors[path_name, kind] += 1
                durations.append(TIMEOUT_SECONDS)
                connection.close()
            if kind == "new":
                connection.close()
            time.sleep(PAUSE_SECONDS)
    return [
        {"what": path_name, "connection": kind, "errors": errors[path_name, kind], **spread(durations)}
        for (path_name, kind), durations in times.items()
    ]


@dataclass
class Attack:
    """Strangers in a process of their own. addresses: of the senders, in turn. counts: connections and bodies by kind.

    json_bytes, upload_bytes: sizes of the bodies, half of which go to a route of each kind.
    """

    port: int
    addresses: tuple[str, ...]
    strangers: dict[str, int]
    json_bytes: int
    upload_bytes: int
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, stop: Any, results: Any) -> None:
        """Attacks until the event `stop`, and puts the counts into the queue `results`."""
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._attack(stop))
        results.put(dict(sorted(self.counts.items())))

    async def _attack(self, stop: Any) -> None:
        kinds = [(kind, index) for kind, number in self.strangers.items() for index in range(number)]
        connections = asyncio.gather(*(self._run_stranger(*stranger, number) for number, stranger in enumerate(kinds)))
        await asyncio.to_thread(stop.wait)
        connections.cancel()
        await connections

    async def _run_stranger(self, kind: str, index: int, number: int) -> None:
        """Connects as one stranger, again after each disconnection."""
        loop, address = asyncio.get_running_loop(), self.addresses[number % len(self.addresses)]
        while True:
            with contextlib.suppress(OSError), socket.socket() as connection:
                connection.setblocking(False)
                connection.bind((address, 0))
                await loop.sock_connect(connection, ("127.0.0.1", self.port))
                self.counts[f"{kind}_connections"] += 1
                if kind == "bodies":
                    await self._send_body(connection, upload=index % 2 == 1)
                elif kind == "half":
                    await loop.sock_sendall(connection, HALF_SENT)
                while await loop.sock_recv(connection, 1 << 16):
                    pass
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _send_body(self, connection: socket.socket, *, upload: bool) -> None:
        loop, remaining = asyncio.get_running_loop(), self.upload_bytes if upload else self.json_bytes
        path = "PUT /v1/leases/x/adapter" if upload else "POST /v1/jobs"
        kind = "application/octet-stream" if upload else "application/json"
        head = f"{path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {remaining}\r\n\r\n"
        await loop.sock_sendall(connection, head.encode())
        while remaining:
            piece = memoryview(PIECE)[: min(remaining, len(PIECE))]
            await loop.sock_sendall(connection, piece)
            remaining -= len(piece)
            self.counts["body_bytes"] += len(piece)
        self.counts["whole_bodies"] += 1
