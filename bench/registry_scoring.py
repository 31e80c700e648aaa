"""Many adapters in one `POST /v1/score`: 64 different ones against one with as many rows, on SmolLM2-135M.

Whole requests to a real `mobizo-server run`, whose scorer holds base and adapters, by turns: rows of 64 adapters, of 8,
of one, and of none; the claim is the median over turns of the ratio of 64 to one. Then, in a process of its own, where
a batch spends its time, and what its floor is (`bench.scoring_share`).
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.programs import DATA, model_file
from bench.step import by_turns, ratio
from server import keys
from server.artifacts.opening import open_artifacts
from server.auth.models import Role
from server.auth.service import TokenService
from server.bases.service import BaseService, inspect
from server.db.database import Database
from server.db.schema import upgrade
from server.settings import Settings
from shared.canonical import sha256_hex
from shared.lora import dump_adapter
from shared.signing import new_private_key, public_text
from tests.server import fake_compiler

ADAPTERS = 64  # as many rows
BASE = "smollm2"
ROUNDS, QUICK_ROUNDS = 7, 3
SECONDS = 600.0
DEVIATION = 0.01  # of B's elements
SEED = 6
Row = dict[str, Any]
RESULT = {
    "steps": 1,
    "best_step": 1,
    "train_seconds": 1.0,
    "seconds": 1.0,
    "peak_rss_bytes": 1,
    "train_examples": 1,
    "truncated_examples": 0,
    "evaluations": [],
    "zero_shot_accuracy": 0.5,
    "tuned_accuracy": 0.6,
}


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    """Rows of both parts, and the claims."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with tempfile.TemporaryDirectory() as name:
        home = _Home(Path(name))
        with _server(home.settings) as port:
            app = _client(port, home.token(Role.APP))
            names = _publish(app, _client(port, home.token(Role.OPERATOR)), port)
            home.register(str(model_file()))
            seconds = _ask(app, names, rounds)
            memory = _scorer_memory(_client(port, home.token(Role.OPERATOR)))
        home.database.close()
    share = _share(rounds)
    rows = [
        {
            "what": "score",
            "adapters": count,
            "rows": ADAPTERS,
            "seconds": statistics.median(times),
            "all_seconds": times,
        }
        for count, times in seconds.items()
    ]
    claims = {
        "score_64_vs_1": ratio(seconds[ADAPTERS], seconds[1]),
        "score_8_vs_1": ratio(seconds[8], seconds[1]),
        "score_1_vs_base": ratio(seconds[1], seconds[0]),
        "score_rss_bytes": memory,
    }
    return [*rows, *share["rows"]], claims | share["claims"]


class _Home:
    """A home with the real base, whose programs are made by the tests' compiler."""

    def __init__(self, directory: Path) -> None:
        self.settings = Settings(
            home=directory / "home",
            signed_requests="none",
            token_rate=1e6,
            address_rate=1e6,
            scorer_seconds=SECONDS,
            migrate_at_start=True,
            compiler_command=[sys.executable, fake_compiler.__file__],
        )
        self.settings.home.mkdir()
        keys.create_key(self.settings.key_path)
        self.database, self._artifacts = Database(self.settings.url), open_artifacts(self.settings)
        upgrade(self.database.engine)
        base = inspect(BASE, str(model_file()), self._artifacts)
        # The tests' compiler reads shapes and tokenizer from a directory.
        source = directory / "source"
        source.mkdir()
        (source / "shape.json").write_text(base.shape.model_dump_json())
        (source / "tokenizer.json").write_bytes(self._artifacts.read(base.tokenizer_sha256))
        self.register(str(source))

    def register(self, source: str) -> None:
        """The base is read from `source` from now on."""
        base = inspect(BASE, str(model_file()), self._artifacts)
        base.source = source
        with self.database.writing() as session:
            BaseService(session, self._artifacts).register(base)

    def token(self, role: Role) -> str:
        """A new token."""
        with self.database.writing() as session:
            return TokenService(session).issue(role, "default", "bench")[1]


@contextmanager
def _server(settings: Settings) -> Iterator[int]:
    """`mobizo-server run` with a worker; its port."""
    command = [sys.executable, "-m", "server.cli", "run", "--port", "0", "--workers", "1"]
    environment = os.environ | settings.environment() | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        if found is None:
            raise RuntimeError("the server did not start")
        yield int(found[1])
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _client(port: int, token: str) -> httpx.Client:
    return httpx.Client(
        base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {token}"}, timeout=SECONDS
    )


def _publish(app: httpx.Client, operator: httpx.Client, port: int) -> list[str]:
    """Adapters of one recipe (rank 16 on queries and values), each another B; their names."""
    once = operator.post("/v1/enrolments", json={}).raise_for_status().json()["token"]
    body = {"name": "bench", "public_key": public_text(new_private_key().public_key()), "platform": "linux"}
    device = _client(port, _client(port, once).post("/v1/devices", json=body).raise_for_status().json()["token"])
    names = []
    for number in range(ADAPTERS):
        job = {
            "base": "smollm2",
            "user": f"user-{number}",
            "adapter": f"adapter-{number}",
            "task": "sst2",
            "dataset": "d",
        }
        app.post("/v1/jobs", json=job).raise_for_status()
        lease = None
        while lease is None:
            response = device.post("/v1/leases", json={"datasets": ["d"], "wait_seconds": 10}).raise_for_status()
            lease = response.json() if response.status_code == 200 else None
        size = lease["manifest"]["manifest"]["size"]
        data = dump_adapter(np.random.default_rng(number).normal(0, DEVIATION, size).astype(np.float32), {})
        device.put(f"/v1/leases/{lease['id']}/adapter", content=data).raise_for_status()
        done = {"adapter_sha256": sha256_hex(data), "result": RESULT}
        device.post(f"/v1/leases/{lease['id']}/complete", json=done).raise_for_status()
        names.append(job["adapter"])
    return names


def _ask(app: httpx.Client, names: list[str], rounds: int) -> dict[int, list[float]]:
    """Seconds of requests of as many rows of so many adapters, by turns."""
    records = [json.loads(line) for line in (DATA / "test.jsonl").read_text().splitlines()]
    rng = random.Random(SEED)

    def ask(count: int) -> Any:
        def call(number: int) -> None:
            chosen = random.Random(f"{SEED}-{number}").sample(records, ADAPTERS)  # the same for all of a turn
            rows = [
                {"adapter": names[row % count] if count else None, "record": {"text": record["text"]}}
                for row, record in enumerate(chosen)
            ]
            rng.shuffle(rows)
            found = app.post("/v1/score", json={"base": BASE, "task": "sst2", "rows": rows}).raise_for_status()
            if len(found.json()["rows"]) != ADAPTERS:
                raise RuntimeError("rows are missing")

        return call

    counts = (ADAPTERS, 1, 8, 0)
    seconds = by_turns(rounds, {str(count): ask(count) for count in counts})
    return {count: seconds[str(count)] for count in counts}


def _scorer_memory(operator: httpx.Client) -> float:
    """The scorer's resident bytes."""
    text = operator.get("/metrics").raise_for_status().text
    found = re.search(r"^mobizo_scorer_resident_bytes (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _share(rounds: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.scoring_share", str(rounds)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"bench.scoring_share failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
