"""`python -m bench.server.virtual`: many virtual devices in one process, which cost the machine little.

Reads its settings as the first line of standard input, then one phase a line, and prints the results as JSON.
Every device has its own kept connection, token and key, and signs every request as agents do. In a phase of rounds,
devices are members of cohorts: they wait for a round's job, report once, upload a random update and complete the job.
"""

import asyncio
import json
import random
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Literal

import numpy as np
from pydantic import BaseModel

from bench.server.home import DATASET, RESULT, Credentials
from server.web.connections import raise_descriptor_limit
from shared.canonical import canonical_json, sha256_hex
from shared.zo.lora import dump_adapter

CAPABILITIES = {"backends": ["xnnpack", "portable"], "engines": ["native"], "executorch": "1.5.1", "cohorts": True}
REPORT = {"datasets": [DATASET], "memory_bytes": 2_000_000_000, "capabilities": CAPABILITIES}
STEPS = 1_000_000

Kind = Literal["connect", "poll", "acquire", "heartbeat", "leave", "release", "round"]


class FleetSettings(BaseModel):
    """The devices of one process, and the port of their server."""

    port: int
    devices: list[Credentials]


class Phase(BaseModel):
    """Requests of one kind, at most `at_once` at a time, until one of the limits is reached.

    wait_seconds: how long a poll waits for a job; devices draw theirs from the upper half. a_sha256: of the cohorts'
    frozen A, in rounds. Of these, only requests in which a device took part in a round count for `requests`.
    """

    kind: Kind
    requests: int
    at_once: int
    seconds: float = 600.0
    wait_seconds: float = 0.0
    a_sha256: str = ""


class PhaseResult(BaseModel):
    """The seconds of each request of a phase, and the errors. A poll's wait is not counted."""

    seconds: list[float] = []
    errors: list[str] = []


class Device:
    """One virtual device."""

    def __init__(self, credentials: Credentials, port: int) -> None:
        self._token, self._signer, self._port = credentials.token, credentials.signer(), port
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lease, self._step = "", 0

    async def take_part(self, a_sha256: str, wait_seconds: float) -> str | None:
        """Waits for a round's job and completes it. Returns an error message, "" without a job, None at success."""
        status, content = await self._request("POST", "/v1/leases", _json(REPORT | {"wait_seconds": wait_seconds}))
        if status == 204:
            return ""
        if status != 200:
            return f"poll: {status} {content[:300]!r}"
        lease = json.loads(content)
        size, path = lease["manifest"]["manifest"]["size"], f"/v1/leases/{lease['id']}"
        flat = np.random.default_rng().standard_normal(size, np.float32)
        update = dump_adapter(flat, {"mobizo": canonical_json({"a_sha256": a_sha256}).decode()})
        completion = {"adapter_sha256": sha256_hex(update), "result": RESULT.model_dump(mode="json")}
        for method, name, body in (
            ("POST", "heartbeat", _json({"phase": "training", "step": 1, "steps": 3, "loss": 0.5})),
            ("PUT", "adapter", update),
            ("POST", "complete", _json(completion)),
        ):
            status, content = await self._request(method, f"{path}/{name}", body)
            if status != 200:
                return f"{name}: {status} {content[:300]!r}"
        return None

    async def send_request(self, kind: Kind, wait_seconds: float) -> str | None:
        """Sends one request of a kind. Returns an error message, or None if the response is as expected.

        connect: over a new connection, the smallest request there is.
        """
        if kind == "connect":
            if self._connection is not None:
                self._connection[1].close()
                self._connection = None
            status, content = await self._request("GET", "/healthz", b"")
            return None if status == 200 else f"{kind}: {status} {content[:300]!r}"
        path, body, expected = f"/v1/leases/{self._lease}/{kind}", {}, 200
        if kind in ("poll", "acquire"):
            path, body = "/v1/leases", REPORT | {"wait_seconds": wait_seconds}
            expected = 204 if kind == "poll" else 200
        elif kind == "heartbeat":
            self._step += 1
            body = {"phase": "training", "step": self._step, "steps": STEPS, "loss": 0.5}
        status, content = await self._request("POST", path, _json(body) if body else b"")
        if kind == "acquire" and status == 200:
            self._lease = json.loads(content)["id"]
        return None if status == expected else f"{kind}: {status} {content[:300]!r}"

    async def _request(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if self._connection is not None:
            # The server closes connections that are idle for long.
            with suppress(OSError, EOFError):
                return await self._send(*self._connection, method, path, body)
            self._connection[1].close()
        self._connection = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        return await self._send(*self._connection, method, path, body)

    async def _send(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str, body: bytes
    ) -> tuple[int, bytes]:
        headers = {
            "Host": "127.0.0.1",
            "Authorization": f"Bearer {self._token}",
            "Content-Length": str(len(body)),
            **({"Content-Type": _content_type(method)} if body else {}),
            **self._signer.headers(method, path, "", body),
        }
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = head.partition("\r\ncontent-length: ")[2].partition("\r\n")[0]
        return int(head.split(" ", 2)[1]), await reader.readexactly(int(length or 0))


def _json(body: object) -> bytes:
    return json.dumps(body).encode()


def _content_type(method: str) -> str:
    """Only files are uploaded with PUT."""
    return "application/octet-stream" if method == "PUT" else "application/json"


async def run_phase(devices: list[Device], phase: Phase) -> PhaseResult:
    """Lets the devices send the requests of a phase by turns."""
    result, remaining, deadline = PhaseResult(), phase.requests, time.monotonic() + phase.seconds
    idle = deque(devices)

    async def take_turns() -> None:
        nonlocal remaining
        while remaining > 0 and time.monotonic() < deadline:
            device = idle.popleft()
            wait = phase.wait_seconds * random.uniform(0.5, 1.0)
            start = time.perf_counter()
            if phase.kind == "round":
                error = await device.take_part(phase.a_sha256, wait)
                remaining -= error is None
            else:
                remaining -= 1
                error = await device.send_request(phase.kind, wait)
            result.seconds.append(time.perf_counter() - start - wait)
            if error:
                result.errors.append(error)
            idle.append(device)

    await asyncio.gather(*(take_turns() for _ in range(min(phase.at_once, len(devices)))))
    return result


async def main() -> None:
    """Runs each phase that standard input contains."""
    raise_descriptor_limit()
    settings = FleetSettings.model_validate_json(sys.stdin.readline())
    devices = [Device(credentials, settings.port) for credentials in settings.devices]
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        result = await run_phase(devices, Phase.model_validate_json(line))
        print(result.model_dump_json(), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
