"""Publishing an adapter of D = 6.3 million: what a device waits for once its file has arrived, on both databases.

TinyLlama's shape, all seven linear layers, rank 16. A device sends its LoRA-B to `mobizo-server run` over HTTP. `check`
is from the last byte sent to the receipt (read, validated, stored), `complete` makes the version (manifest, signature,
rule, audit). `first_pull` is what the first who asks for the PEFT directory waits for, `pull` the others; neither is
part of publishing. The claim is a round's check and complete together: the median, of the slower database.
"""

from __future__ import annotations

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

from bench.server_home import BASE, DATASET, Credentials, fill, running
from server.settings import Settings
from shared.canonical import sha256_hex
from shared.job import JobRequest, Result, TrainingSettings
from shared.lora import BaseShape, dump_adapter
from shared.recipe import TARGETS, RecipeSettings
from shared.request_signature import RequestSigner
from tests.postgres import Postgres

SHAPE = BaseShape(
    architecture="llama",
    layers=22,
    hidden=2048,
    intermediate=5632,
    heads=32,
    kv_heads=4,
    head_dim=64,
    vocabulary=32000,
    context_length=2048,
)
WANTED = JobRequest(
    base=BASE,
    user="user-0",
    adapter="adapter-0",
    task="sst2",
    dataset=DATASET,
    recipe=RecipeSettings(rank=16, targets=TARGETS, sequence_length=16, queries=1, effective_batch=2),
    training=TrainingSettings(steps=3),
)
RESULT = Result(
    steps=3,
    best_step=2,
    train_seconds=1,
    seconds=2,
    peak_rss_bytes=1000,
    train_examples=10,
    truncated_examples=0,
    zero_shot_accuracy=0.5,
    tuned_accuracy=0.75,
)
ROUNDS, QUICK_ROUNDS = 7, 3
PIECE = 1 << 20
SEED = 11
Row = dict[str, Any]


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    """A row for each database, seconds, and the claim."""
    rounds, rows = QUICK_ROUNDS if quick else ROUNDS, []
    with tempfile.TemporaryDirectory() as name:
        postgres = Postgres().start()
        try:
            for kind, url in (("sqlite", None), ("postgresql", postgres.create("publish"))):
                settings = Settings(home=Path(name) / kind, database_url=url)
                app, devices = fill(settings, 1, SHAPE, WANTED)
                with running(settings) as (server, _):
                    rows.append({"what": "publish", "database": kind, **_publish(server, app, devices[0], rounds)})
        finally:
            postgres.remove()
    return rows, {"publish_seconds": max(row["publish_seconds"] for row in rows)}


@dataclass
class Sent:
    """A body in pieces, and when its last one was handed over."""

    data: bytes
    at: float = 0.0

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self.data), PIECE):
            yield self.data[start : start + PIECE]
        self.at = time.perf_counter()


class _Device(httpx.Client):
    """A device that signs what it sends."""

    def __init__(self, server: str, credentials: Credentials) -> None:
        super().__init__(base_url=server, timeout=60, headers={"Authorization": f"Bearer {credentials.token}"})
        key = Ed25519PrivateKey.from_private_bytes(base64.b64decode(credentials.key))
        self._signer = RequestSigner(key, time.time)

    def ask(self, method: str, path: str, data: bytes, kind: str = "application/json") -> tuple[httpx.Response, float]:
        """The answer, and seconds from the body's last byte to it."""
        sent = Sent(data)
        headers = self._signer.headers(method, path, "", data)
        headers |= {"Content-Type": kind, "Content-Length": str(len(data))}
        answer = self.request(method, path, content=sent, headers=headers)
        seconds = time.perf_counter() - sent.at
        answer.raise_for_status()
        return answer, seconds


def _publish(server: str, app_token: str, credentials: Credentials, rounds: int) -> Row:
    rng, checks, completions, first, later = np.random.default_rng(SEED), [], [], [], []
    bearer = {"Authorization": f"Bearer {app_token}"}
    size = 0
    with httpx.Client(base_url=server, headers=bearer, timeout=60) as app, _Device(server, credentials) as device:
        for _ in range(rounds):
            app.post("/v1/jobs", json=WANTED.model_dump(mode="json")).raise_for_status()
            lease = device.ask("POST", "/v1/leases", b'{"datasets": ["%s"]}' % DATASET.encode())[0].json()
            size = lease["manifest"]["manifest"]["size"]
            data = dump_adapter(rng.standard_normal(size).astype(np.float32), {"job": lease["job"]["id"]})
            path = f"/v1/leases/{lease['id']}"
            checks.append(device.ask("PUT", f"{path}/adapter", data, "application/octet-stream")[1])
            body = {"adapter_sha256": sha256_hex(data), "result": RESULT.model_dump(mode="json")}
            answer, seconds = device.ask("POST", f"{path}/complete", httpx.Request("POST", "/", json=body).content)
            completions.append(seconds)
            root = f"/v1/adapters/{WANTED.adapter}/versions/{answer.json()['version']}/peft"
            first.append(_fetched(app, root))
            later.append(_fetched(app, root))
    both = [check + complete for check, complete in zip(checks, completions, strict=True)]
    return {
        "d": size,
        "rounds": rounds,
        "check_seconds": statistics.median(checks),
        "complete_seconds": statistics.median(completions),
        "publish_seconds": statistics.median(both),
        "slowest_seconds": max(both),
        "first_pull_seconds": statistics.median(first),
        "pull_seconds": statistics.median(later),
    }


def _fetched(app: httpx.Client, path: str) -> float:
    """Seconds until the whole answer is here."""
    begun = time.perf_counter()
    app.get(path).raise_for_status()
    return time.perf_counter() - begun
