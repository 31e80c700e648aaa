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

from bench.result import Measured, Row
from bench.runner import cpu_seconds
from bench.server.home import client, job, make_home, new_token, peak_memory, running, spread, submit
from server.settings import Settings
from shared.access import Role

SECONDS, QUICK_SECONDS = 60.0, 12.0
GATHER_SECONDS = 5.0  # until all strangers are there
PAUSE = 0.02  # seconds between two requests of the honest client
PATIENCE = 10.0  # seconds; a request that takes longer is an error, and counts with this time
IDLE, HALF, BODIES = 1000, 1000, 100
MORE_THAN_ALL = 2.5  # times as many idle and half-sent connections meet the limit in all
ADDRESSES = {"one": 1, "many": 8}
PIECE = b" " * (256 << 10)
HALF_SENT = b"POST /v1/jobs HTTP/1.1\r\nHost: strangers\r\nContent-Type: application/js"
AGAIN_SECONDS = 1.0  # until a stranger that was disconnected connects again


def measure(quick: bool) -> Measured:
    """Returns rows of each kind of request without and with strangers; the claims are the worst with strangers."""
    seconds, rows = QUICK_SECONDS if quick else SECONDS, []
    with tempfile.TemporaryDirectory() as name:
        for addresses, number in ADDRESSES.items():
            factor = MORE_THAN_ALL if number > 1 else 1
            strangers = {"idle": round(IDLE * factor), "half": round(HALF * factor), "bodies": BODIES}
            found = besieged(make_home(Path(name) / addresses), number, strangers, seconds)
            rows += [{"addresses": addresses, **row} for row in found]
    attacked = [row for row in rows if row["strangers"] and row["what"] != "server"]
    return rows, {
        "strangers_p99_ms": max(row["p99_ms"] for row in attacked),
        "strangers_errors": float(sum(row["errors"] for row in attacked)),
        "strangers_rss_bytes": float(max(row["peak_rss_bytes"] for row in rows if row["what"] == "server")),
    }


def besieged(settings: Settings, addresses: int, strangers: dict[str, int], seconds: float) -> list[Row]:
    """Runs a server alone and with strangers from some addresses. strangers: connections by kind."""
    token, spawn = new_token(settings, Role.APP), multiprocessing.get_context("spawn")
    with running(settings) as (url, server):
        with client(url, token) as app:
            paths = {"healthz": "/healthz", "job": f"/v1/jobs/{submit(app, job())['id']}"}
        port = int(url.rpartition(":")[2])
        rows = [{"strangers": 0, **row} for row in asked(port, token, paths, seconds / 4)]
        senders = tuple(f"127.0.1.{last}" for last in range(1, addresses + 1))
        attack = Attack(port, senders, strangers, settings.max_body_bytes, settings.upload_bytes)
        before, stop, found = cpu_seconds(server), spawn.Event(), spawn.Queue()
        process = spawn.Process(target=attack.run, args=(stop, found), daemon=True)
        process.start()
        try:
            time.sleep(GATHER_SECONDS)
            rows += [{"strangers": sum(strangers.values()), **row} for row in asked(port, token, paths, seconds)]
            spent, peak = cpu_seconds(server) - before, peak_memory(server.pid)
        finally:
            stop.set()
            did = found.get(timeout=PATIENCE)
            process.join()
    about = {"strangers": sum(strangers.values()), "what": "server", "peak_rss_bytes": peak, "cpu_seconds": spent}
    return [*rows, about | did]


def asked(port: int, token: str, paths: dict[str, str], seconds: float) -> list[Row]:
    """Asks for each path by turns, for so many seconds; returns a row of each kind of request. paths: by name."""
    links = {kind: HTTPConnection("127.0.0.1", port, timeout=PATIENCE) for kind in ("kept", "new")}
    times: dict[tuple[str, str], list[float]] = {each: [] for each in product(paths, links)}
    errors: Counter[tuple[str, str]] = Counter()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for (what, kind), found in times.items():
            link, began = links[kind], time.monotonic()
            try:
                link.request("GET", paths[what], headers={"Authorization": f"Bearer {token}"})  # connects if needed
                response = link.getresponse()
                response.read()
                if response.status != 200:
                    raise HTTPException(f"status {response.status}")
                found.append(time.monotonic() - began)
            except (OSError, HTTPException):
                errors[what, kind] += 1
                found.append(PATIENCE)
                link.close()
            if kind == "new":
                link.close()
            time.sleep(PAUSE)
    return [
        {"what": what, "connection": kind, "errors": errors[what, kind], **spread(found)}
        for (what, kind), found in times.items()
    ]


@dataclass
class Attack:
    """Strangers in a process of their own. addresses: of the senders, in turn. did: connections and bodies by kind.

    json_bytes, upload_bytes: sizes of the bodies, half of which go to a route of each kind.
    """

    port: int
    addresses: tuple[str, ...]
    strangers: dict[str, int]
    json_bytes: int
    upload_bytes: int
    did: Counter[str] = field(default_factory=Counter)

    def run(self, stop: Any, found: Any) -> None:
        """Attacks until the event `stop`, and puts what it did into the queue `found`."""
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._attack(stop))
        found.put(dict(sorted(self.did.items())))

    async def _attack(self, stop: Any) -> None:
        kinds = [(kind, place) for kind, number in self.strangers.items() for place in range(number)]
        everyone = asyncio.gather(*(self._stay(*each, number) for number, each in enumerate(kinds)))
        await asyncio.to_thread(stop.wait)
        everyone.cancel()
        await everyone

    async def _stay(self, kind: str, place: int, number: int) -> None:
        """One stranger, who connects again and again."""
        loop, address = asyncio.get_running_loop(), self.addresses[number % len(self.addresses)]
        while True:
            with contextlib.suppress(OSError), socket.socket() as link:
                link.setblocking(False)
                link.bind((address, 0))
                await loop.sock_connect(link, ("127.0.0.1", self.port))
                self.did[f"{kind}_connections"] += 1
                if kind == "bodies":
                    await self._send_body(link, upload=place % 2 == 1)
                elif kind == "half":
                    await loop.sock_sendall(link, HALF_SENT)
                while await loop.sock_recv(link, 1 << 16):
                    pass
            await asyncio.sleep(AGAIN_SECONDS)

    async def _send_body(self, link: socket.socket, *, upload: bool) -> None:
        loop, left = asyncio.get_running_loop(), self.upload_bytes if upload else self.json_bytes
        path = "PUT /v1/leases/x/adapter" if upload else "POST /v1/jobs"
        kind = "application/octet-stream" if upload else "application/json"
        head = f"{path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {left}\r\n\r\n"
        await loop.sock_sendall(link, head.encode())
        while left:
            piece = memoryview(PIECE)[: min(left, len(PIECE))]
            await loop.sock_sendall(link, piece)
            left -= len(piece)
            self.did["body_bytes"] += len(piece)
        self.did["whole_bodies"] += 1
