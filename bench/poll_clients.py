"""The clients of bench.server_polls, in a process of their own: `python -m bench.poll_clients`, its orders on stdin.

Each device has a connection of its own: it asks for a job and waits, sends heartbeats while it has one, hands in an
adapter and asks again, and signs all that as agents do. Meanwhile an app submits jobs at a steady rate. Bare sockets:
an HTTP library would take more of the machine than the server. Prints seconds of each kind of request as JSON.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel

from device_agent.backoff import jittered
from shared.canonical import sha256_hex
from shared.job import Progress, Result
from shared.lora import dump_adapter
from shared.protocol import Completion, LeaseRequest
from shared.request_signature import RequestSigner

WAIT_SECONDS, BEAT_SECONDS, BEATS = 20.0, 5.0, 2
WARM_UP = 10  # jobs
CAPABILITIES = {"backends": ["xnnpack", "portable"], "engines": ["native"], "executorch": "1.5.1"}


class Orders(BaseModel):
    """What to do. rate: jobs a second. devices: (token, key) of each; key: Ed25519, base64."""

    host: str
    port: int
    rate: float
    dataset: str
    app: str
    jobs: list[dict[str, Any]]
    devices: list[tuple[str, str]]


@dataclass
class Notes:
    """Seconds of each kind of request, and what went wrong."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: list[str] = field(default_factory=list)
    submitted: dict[str, float] = field(default_factory=dict)  # when a job was sent, by its adapter's name


class Connection:
    """HTTP over one socket, one request at a time."""

    def __init__(self, orders: Orders, token: str, signer: RequestSigner | None = None) -> None:
        self._orders, self._token, self._signer = orders, token, signer
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes, kind: str = "application/json") -> tuple[int, bytes]:
        """Status and body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._orders.host, self._orders.port)
        reader, writer = self._streams
        headers = {
            "Host": "bench",
            "Authorization": f"Bearer {self._token}",
            "Content-Type": kind,
            "Content-Length": str(len(body)),
        }
        if self._signer is not None:
            headers |= self._signer.headers(method, path, "", body)
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(head.encode() + b"\r\n" + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(answer.split(" ", 2)[1])
        length = next((line[15:] for line in answer.split("\r\n") if line.startswith("content-length:")), "0")
        return status, await reader.readexactly(int(length))

    def close(self) -> None:
        """Hangs up."""
        if self._streams is not None:
            self._streams[1].close()


class Device:
    """One device at work."""

    def __init__(self, orders: Orders, number: int, notes: Notes) -> None:
        token, key = orders.devices[number]
        signer = RequestSigner(Ed25519PrivateKey.from_private_bytes(base64.b64decode(key)), time.time)
        self._connection = Connection(orders, token, signer)
        self._notes = notes
        self._dataset = orders.dataset

    async def work(self) -> None:
        """Until cancelled."""
        try:
            while True:
                wait = jittered(WAIT_SECONDS)
                body = self._request(wait)
                began = time.monotonic()
                status, content = await self._connection.ask("POST", "/v1/leases", body)
                now = time.monotonic()
                if status == 204:
                    self._notes.seconds["poll without a job"].append(now - began - wait)
                elif status == 200:
                    lease = json.loads(content)
                    sent = self._notes.submitted[lease["job"]["request"]["adapter"]]
                    # A job that was ready before this device asked could not have been given to it any sooner.
                    self._notes.seconds["job to a device"].append(now - max(sent, began))
                    await self._train(lease)
                else:
                    self._notes.errors.append(f"poll: {status} {content[:200]!r}")
                    await asyncio.sleep(1)
        finally:
            self._connection.close()

    def _request(self, wait: float) -> bytes:
        asked = {"datasets": [self._dataset], "wait_seconds": wait, "capabilities": CAPABILITIES}
        return LeaseRequest.model_validate(asked).model_dump_json(exclude_none=True).encode()

    async def _train(self, lease: dict[str, Any]) -> None:
        path = f"/v1/leases/{lease['id']}"
        for step in range(BEATS):
            await asyncio.sleep(BEAT_SECONDS * random.uniform(0.8, 1.2))
            progress = Progress(phase="training", step=step, steps=BEATS, loss=0.5)
            await self._timed("heartbeat", "POST", f"{path}/heartbeat", progress.model_dump_json().encode())
        data = dump_adapter(np.zeros(lease["manifest"]["manifest"]["size"], np.float32), {})
        await self._timed("upload", "PUT", f"{path}/adapter", data, "application/octet-stream")
        result = Result(
            steps=BEATS,
            best_step=BEATS,
            train_seconds=1,
            seconds=1,
            peak_rss_bytes=1,
            train_examples=1,
            truncated_examples=0,
        )
        done = Completion(adapter_sha256=sha256_hex(data), result=result)
        await self._timed("completion", "POST", f"{path}/complete", done.model_dump_json().encode())

    async def _timed(self, name: str, method: str, path: str, body: bytes, kind: str = "application/json") -> None:
        began = time.monotonic()
        status, content = await self._connection.ask(method, path, body, kind)
        self._notes.seconds[name].append(time.monotonic() - began)
        if status != 200:
            self._notes.errors.append(f"{name}: {status} {content[:200]!r}")


async def submit(orders: Orders, notes: Notes) -> None:
    """Jobs at a steady rate, whatever the answers take."""

    async def one(connection: Connection, job: dict[str, Any]) -> None:
        began = notes.submitted[job["adapter"]] = time.monotonic()
        status, content = await connection.ask("POST", "/v1/jobs", json.dumps(job).encode())
        notes.seconds["submission"].append(time.monotonic() - began)
        if status != 202:
            notes.errors.append(f"submission: {status} {content[:200]!r}")
        idle.append(connection)

    idle: list[Connection] = []
    tasks: set[asyncio.Task[None]] = set()
    began = time.monotonic()
    for number, job in enumerate(orders.jobs):
        await asyncio.sleep(max(began + number / orders.rate - time.monotonic(), 0))
        connection = idle.pop() if idle else Connection(orders, orders.app)
        task = asyncio.create_task(guarded(partial(one, connection, job), notes))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()


async def guarded(work: Callable[[], Awaitable[None]], notes: Notes) -> None:
    """`work`, with what breaks it noted."""
    try:
        await work()
    except (OSError, asyncio.IncompleteReadError, KeyError) as error:
        notes.errors.append(f"{type(error).__name__}: {error}")


async def run(orders: Orders) -> Notes:
    """All of it: half a wait for every device to have come, some jobs to warm up, then the measured time."""
    notes = Notes()
    devices = []
    for number in range(len(orders.devices)):
        devices.append(asyncio.create_task(guarded(Device(orders, number, notes).work, notes)))
        # As a fleet comes back when its server was started again: within seconds, not at one moment.
        await asyncio.sleep(WAIT_SECONDS / 2 / len(orders.devices))
    # The first jobs of a server's life compile its statements; it lives longer than this.
    await submit(orders.model_copy(update={"jobs": orders.jobs[:WARM_UP]}), notes)
    await asyncio.sleep(BEAT_SECONDS * BEATS * 1.2 + 1)
    notes.seconds.clear()
    await submit(orders.model_copy(update={"jobs": orders.jobs[WARM_UP:]}), notes)
    await asyncio.sleep(BEAT_SECONDS * BEATS * 1.2 + 1)
    for task in devices:
        task.cancel()
    await asyncio.gather(*devices, return_exceptions=True)
    return notes


def main() -> None:
    """Entry point."""
    notes = asyncio.run(run(Orders.model_validate_json(sys.stdin.read())))
    sys.stdout.write(json.dumps({"seconds": notes.seconds, "errors": notes.errors}))


if __name__ == "__main__":
    main()
