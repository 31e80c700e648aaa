"""`bench server`, tenants: one tenant does its worst with valid tokens, and the other submits, polls and lists.

The first tenant holds bodies and event streams open, submits jobs with long tasks and private jobs, and replaces
uploads, all at the same time, in a process of its own. Its responses 409, 429 and 503 are what the bounds promise. The
second tenant's requests are timed alone before, and during the attack. The attacker runs at the lowest priority: its
own processor time stands for that of other machines.
"""

import asyncio
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np

from bench.result import Measurement, Row
from bench.server import home
from server.settings import Settings
from shared.access import Role
from shared.canonical import canonical_json
from shared.zo.lora import dump_adapter
from tests.server.actors import Actor

SECONDS, QUICK_SECONDS = 60.0, 15.0
BODIES, STREAMS, JOBS, PRIVATE_JOBS = 150, 150, 4, 6  # of the first tenant at once
BODY_BYTES = 4 << 20
TASK_CHARACTERS = 7_900  # the most is 8,000
PAUSE_SECONDS = 0.05  # between two requests of the second tenant
OTHER = "other"
RATES = {name: Settings.model_fields[name].default for name in ("token_rate", "address_rate")}


def measure(quick: bool) -> Measurement:
    """Returns a row for each database, and the worse of both."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, home.both_databases("tenants") as databases:
        for kind, url in databases:
            settings = home.make_home(Path(name) / kind, database_url=url)
            rows.append({"database": kind} | _attacked(settings.model_copy(update=RATES), quick))
    return rows, {f"tenants_{name}": max(row[name] for row in rows) for name in ("p99_ratio", "memory_ratio", "errors")}


def _attacked(settings: Settings, quick: bool) -> Row:
    """Measures the second tenant alone and under attack: ratios of its 99th percentile and of the server's memory."""
    seconds = QUICK_SECONDS if quick else SECONDS
    token, (credentials,) = home.new_token(settings, Role.APP), home.add_devices(settings, 1)
    other = home.new_token(settings, Role.APP, OTHER)
    with closing(home.ServerProcess(settings)) as server:
        with Actor(server.url, token) as app:
            home.submit(app, home.job(0))
        alone, errors, alone_bytes = _serve(server, other, seconds)
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        attack = context.Process(target=_attack, args=(ready, server.url, token, credentials, seconds))
        attack.start()
        ready.wait()
        attacked, more_errors, attacked_bytes = _serve(server, other, seconds)
        attack.join()
    return {
        "p99_ratio": float(np.quantile(attacked, 0.99) / np.quantile(alone, 0.99)),
        "memory_ratio": attacked_bytes / alone_bytes,
        "errors": float(len(errors + more_errors)),
        "first": (errors + more_errors)[:3],
    }


def _serve(server: home.ServerProcess, token: str, duration: float) -> tuple[list[float], list[str], int]:
    """Returns seconds and errors of the second tenant's requests, and the most memory of the server process, bytes."""
    seconds: list[float] = []
    errors: list[str] = []
    peak, end, number = 0, time.monotonic() + duration, 0
    with Actor(server.url, token) as app:
        while time.monotonic() < end:
            number += 1
            job_id = ""
            for method, path in (("POST", "/v1/jobs"), ("GET", "/v1/jobs/{}"), ("GET", "/v1/jobs")):
                began = time.monotonic()
                body = home.job(number) if method == "POST" else None
                response = app.request(method, path.format(job_id), json=body)
                seconds.append(time.monotonic() - began)
                if response.is_error and response.status_code != 429:
                    errors.append(f"{method} {path}: {response.status_code} {response.text[:200]}")
                elif method == "POST":
                    job_id = response.json()["id"]
                peak = max(peak, server.process.memory_info().rss)
                time.sleep(PAUSE_SECONDS)
    return seconds, errors, peak


def _attack(ready: Event, url: str, token: str, credentials: home.Credentials, duration: float) -> None:
    """Does the first tenant's worst for a time."""
    os.nice(19)
    ready.set()
    asyncio.run(_all_attacks(url, token, credentials, duration))


async def _all_attacks(url: str, token: str, credentials: home.Credentials, duration: float) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits) as app:
        job_id = (await app.get("/v1/jobs")).json()["items"][0]["id"]
        calls: list[Callable[[], Awaitable[object]]] = [
            *[lambda: _hold_body(url, token)] * BODIES,
            *[lambda: _follow(app, job_id)] * STREAMS,
            *[lambda: app.post("/v1/jobs", json=_long_job())] * JOBS,
            *[lambda: app.post("/v1/jobs", json=_private_job())] * PRIVATE_JOBS,
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(duration):
                await asyncio.gather(_replace_uploads(app, credentials), *(_repeat(call) for call in calls))


async def _repeat(call: Callable[[], Awaitable[object]]) -> None:
    while True:
        with suppress(httpx.HTTPError, OSError, asyncio.IncompleteReadError):
            await call()
        await asyncio.sleep(0.01)


async def _hold_body(url: str, token: str) -> None:
    """Sends a body one byte short and waits until the server closes the connection."""
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    try:
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        )
        writer.write(f"{head}Content-Length: {BODY_BYTES}\r\n\r\n".encode() + b" " * (BODY_BYTES - 1))
        await reader.read()
    finally:
        writer.close()


async def _follow(app: httpx.AsyncClient, job_id: str) -> None:
    async with app.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        async for _ in response.aiter_bytes():
            pass


def _long_job() -> dict[str, object]:
    task = {
        "name": "long",
        "prompt": "{text} " + "x" * TASK_CHARACTERS,
        "answers": [{"text": "great", "labels": ["1"]}, {"text": "terrible", "labels": ["0"]}],
    }
    return home.job(random.randrange(10**6), task=task)


def _private_job() -> dict[str, object]:
    privacy = {"clip": 0.2, "epsilon": random.uniform(0.5, 8), "sampling_rate": random.uniform(0.001, 0.1)}
    return home.job(random.randrange(10**6), privacy=privacy, training={"steps": random.randint(100, 100_000)})


async def _replace_uploads(app: httpx.AsyncClient, credentials: home.Credentials) -> None:
    signer, headers = credentials.signer(), {"Authorization": f"Bearer {credentials.token}"}

    async def send(method: str, path: str, data: bytes, kind: str) -> httpx.Response:
        signed = signer.headers(method, path, "", data) | headers | {"Content-Type": kind}
        return await app.request(method, path, content=data, headers=signed)

    lease = (await send("POST", "/v1/leases", canonical_json({"datasets": [home.DATASET]}), "application/json")).json()
    path, size = f"/v1/leases/{lease['id']}/adapter", lease["manifest"]["manifest"]["size"]

    async def replace() -> object:
        data = dump_adapter(np.full(size, random.random(), np.float32), {"job": json.dumps("x")})
        return await send("PUT", path, data, "application/octet-stream")

    await _repeat(replace)
