"""`bench registry`, publish: publishing an adapter of D = 6.3 million, on both databases.

TinyLlama's shape, all seven linear layers, rank 16. A device sends its LoRA-B to `mobizo-server run` over HTTP. `check`
is from the last byte sent to the receipt (read, validated, stored); `complete` is the version (manifest, signature,
rule, audit). The claim is the median of check and complete together, of the slower database.
"""

import base64
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.result import Measured, Row
from bench.server.home import (
    ALL_TARGETS,
    DATASET,
    RESULT,
    TINYLLAMA,
    Credentials,
    add_devices,
    both_databases,
    client,
    job,
    make_home,
    new_token,
    running,
    submit,
)
from server.settings import Settings
from shared.access import Role
from shared.canonical import canonical_json, sha256_hex
from shared.request_signature import RequestSigner
from shared.zo.lora import dump_adapter

JOB = job(0, ALL_TARGETS)
ROUNDS, QUICK_ROUNDS = 7, 3
PIECE = 1 << 20
SEED = 11


def measure(quick: bool) -> Measured:
    """Returns a row for each database, and the claim."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, both_databases("publish") as databases:
        for kind, url in databases:
            settings = make_home(Path(name) / kind, TINYLLAMA, database_url=url)
            row = _measure(settings, QUICK_ROUNDS if quick else ROUNDS)
            rows.append({"what": "publish", "database": kind, **row})
    return rows, {"publish_seconds": max(row["publish_seconds"] for row in rows)}


def _measure(settings: Settings, rounds: int) -> Row:
    (credentials,), token = add_devices(settings, 1), new_token(settings, Role.APP)
    with running(settings) as (url, _), client(url, token) as app, Device(url, credentials) as device:
        found = [publish(app, device, np.random.default_rng(SEED + number)) for number in range(rounds)]
    both = [one.check + one.complete for one in found]
    return {
        "d": found[0].size,
        "rounds": rounds,
        "check_seconds": statistics.median(one.check for one in found),
        "complete_seconds": statistics.median(one.complete for one in found),
        "publish_seconds": statistics.median(both),
        "slowest_seconds": max(both),
    }


@dataclass
class Published:
    """A published adapter with D = `size`, and seconds."""

    size: int
    check: float
    complete: float


@dataclass
class Pieces:
    """A request body in pieces, and when its last piece was sent."""

    data: bytes
    at: float = 0.0

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self.data), PIECE):
            yield self.data[start : start + PIECE]
        self.at = time.perf_counter()


class Device(httpx.Client):
    """A device that signs its requests."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        super().__init__(base_url=url, timeout=60, headers={"Authorization": f"Bearer {credentials.token}"})
        key = Ed25519PrivateKey.from_private_bytes(base64.b64decode(credentials.key))
        self._signer = RequestSigner(key, time.time)

    def ask(self, method: str, path: str, body: object) -> tuple[httpx.Response, float]:
        """Returns the answer, and the seconds from the body's last byte to it."""
        data = body if isinstance(body, bytes) else canonical_json(body)
        sent = Pieces(data)
        headers = self._signer.headers(method, path, "", data) | {"Content-Length": str(len(data))}
        headers["Content-Type"] = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        answer = self.request(method, path, content=sent, headers=headers)
        return answer.raise_for_status(), time.perf_counter() - sent.at


def publish(
    app: httpx.Client, device: Device, rng: np.random.Generator, body: dict[str, Any] = JOB, deviation: float = 1.0
) -> Published:
    """Submits a job and publishes a random B for it through the routes of a device."""
    submit(app, body)
    lease = device.ask("POST", "/v1/leases", {"datasets": [DATASET]})[0].json()
    size, path = lease["manifest"]["manifest"]["size"], f"/v1/leases/{lease['id']}"
    data = dump_adapter(rng.normal(0, deviation, size).astype(np.float32), {"job": lease["job"]["id"]})
    _, check = device.ask("PUT", f"{path}/adapter", data)
    done = {"adapter_sha256": sha256_hex(data), "result": RESULT.model_dump(mode="json")}
    _, complete = device.ask("POST", f"{path}/complete", done)
    return Published(size, check, complete)
