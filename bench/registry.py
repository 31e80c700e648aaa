"""`bench registry`: how fast adapters are published, downloaded, scored and verified.

- publish: adapters of TinyLlama's shape, all seven linear layers, rank 16 (D = 6.3 million), on both databases. A
  device sends its LoRA-B to `mobizo-server run` over HTTP. `check` is from the last byte sent to the receipt (read,
  validated, stored); `complete` is the version (manifest, signature, rule, audit). The claim is the median of check and
  complete together, of the slower database.
- downloads: such an adapter's PEFT directory by the Hub-compatible route, as a ratio to nginx on the same files. Each
  download fetches every file of the directory; see `bench.server.downloads` for the sources.
- scoring: rows of 64 adapters in one `POST /v1/score` against rows of one, on SmolLM2-135M. Whole requests to a real
  `mobizo-server run`, by turns: rows of 64 adapters, of 8, of one, of none; claims are medians over turns.
- replay: a trajectory read strictly, replayed in blocks and compared with B, on one core.
"""

import json
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from huggingface_hub import HfApi

from bench.programs import MOVIES, model_file
from bench.result import Measurement, Row
from bench.runner import Parts, command_of, ratio, time_by_turns
from bench.server import home
from bench.server.downloads import against_nginx
from server.catalog.bases import BaseService, inspect
from server.database.database import Database
from server.settings import Delivery, Settings
from server.storage.directory import DiskArtifacts
from server.storage.opening import open_artifacts
from shared.access import DEFAULT_TENANT, Role
from shared.canonical import canonical_json, sha256_hex
from shared.zo.lora import dump_adapter
from shared.zo.replay import replay
from shared.zo.trajectory import MAGIC, TrajectoryHeader, frame
from shared.zo.trajectory_reader import read_ledger

JOB = home.job(0, home.ALL_TARGETS)
ROUNDS, QUICK_ROUNDS = 7, 2
SEED = 6
PIECE = 1 << 20


def measure_publishing(quick: bool) -> Measurement:
    """Returns a row for each database, and the claim."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, home.both_databases("publish") as databases:
        for kind, url in databases:
            settings = home.make_home(Path(name) / kind, home.TINYLLAMA, database_url=url)
            row = _publish_on(settings, QUICK_ROUNDS if quick else ROUNDS)
            rows.append({"what": "publish", "database": kind, **row})
    return rows, {"publish_seconds": max(row["publish_seconds"] for row in rows)}


def _publish_on(settings: Settings, rounds: int) -> Row:
    (credentials,), token = home.add_devices(settings, 1), home.new_token(settings, Role.APP)
    with home.running_server(settings) as (url, _), home.client(url, token) as app, Device(url, credentials) as device:
        timings = [publish(app, device, np.random.default_rng(SEED + number)) for number in range(rounds)]
    seconds = {"check": [check for _, check, _ in timings], "complete": [complete for *_, complete in timings]}
    seconds["publish"] = [check + complete for _, check, complete in timings]
    medians = {f"{name}_seconds": statistics.median(each) for name, each in seconds.items()}
    return {"d": timings[0][0], "rounds": rounds, **medians}


@dataclass
class TimedBody:
    """A request body in pieces. sent_at: time at which the last piece was sent."""

    data: bytes
    sent_at: float = 0.0

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self.data), PIECE):
            yield self.data[start : start + PIECE]
        self.sent_at = time.perf_counter()


class Device(httpx.Client):
    """A device that signs its requests."""

    def __init__(self, url: str, credentials: home.Credentials) -> None:
        super().__init__(base_url=url, timeout=60, headers={"Authorization": f"Bearer {credentials.token}"})
        self._signer = credentials.signer()

    def send_signed(self, method: str, path: str, body: object) -> tuple[httpx.Response, float]:
        """Returns the response, and the seconds from the body's last byte to the response."""
        data = body if isinstance(body, bytes) else canonical_json(body)
        content = TimedBody(data)
        headers = self._signer.headers(method, path, "", data) | {"Content-Length": str(len(data))}
        headers["Content-Type"] = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        response = self.request(method, path, content=content, headers=headers)
        return response.raise_for_status(), time.perf_counter() - content.sent_at


def publish(
    app: httpx.Client, device: Device, rng: np.random.Generator, body: dict[str, Any] = JOB, deviation: float = 1.0
) -> tuple[int, float, float]:
    """Submits a job and publishes a random B for it through the routes of a device.

    Returns D, and the seconds of the check and of the completion.
    """
    home.submit(app, body)
    lease = device.send_signed("POST", "/v1/leases", {"datasets": [home.DATASET]})[0].json()
    size, path = lease["manifest"]["manifest"]["size"], f"/v1/leases/{lease['id']}"
    data = dump_adapter(rng.normal(0, deviation, size).astype(np.float32), {"job": lease["job"]["id"]})
    _, check = device.send_signed("PUT", f"{path}/adapter", data)
    completion = {"adapter_sha256": sha256_hex(data), "result": home.RESULT.model_dump(mode="json")}
    _, complete = device.send_signed("POST", f"{path}/complete", completion)
    return size, check, complete


DOWNLOADS, QUICK_DOWNLOADS = 40, 8  # at once
REPOSITORY = f"{DEFAULT_TENANT}/{JOB['adapter']}"
FileSet = tuple[tuple[str, int], ...]  # path and bytes of each file


def measure_downloads(quick: bool) -> Measurement:
    """Returns a row for each source, and the ratios of median times."""
    downloads, rounds = (QUICK_DOWNLOADS, QUICK_ROUNDS) if quick else (DOWNLOADS, ROUNDS)
    with tempfile.TemporaryDirectory() as name:
        settings = home.make_home(Path(name), home.TINYLLAMA, delivery=Delivery.ACCEL)
        token = home.new_token(settings, Role.APP)
        with home.running_server(settings) as (url, process):
            hub_files, stored_files = publish_directory(settings, url, token)
            rows, claims = against_nginx(
                settings, (url, process.pid), token, ((hub_files,), (stored_files,)), downloads, rounds
            )
    claims.pop("download_rss_bytes", None)
    return [row | {"files": len(hub_files)} for row in rows], claims


def publish_directory(settings: Settings, url: str, token: str) -> tuple[FileSet, FileSet]:
    """Publishes an adapter; returns the paths of its PEFT files on the Hub's route, and in the store."""
    (credentials,) = home.add_devices(settings, 1)
    with home.client(url, token) as app, Device(url, credentials) as device:
        publish(app, device, np.random.default_rng(SEED), deviation=0.01)
    info = HfApi(url, token).model_info(REPOSITORY, files_metadata=True)
    files = [(file.rfilename, file.size or 0, file.lfs.sha256) for file in info.siblings or () if file.lfs]
    hub_files = tuple((f"/{REPOSITORY}/resolve/{info.sha}/{path}", size) for path, size, _ in files)
    return hub_files, tuple((f"/{DiskArtifacts.name(sha256)}", size) for _, size, sha256 in files)


ADAPTERS = 64  # as many rows
SECONDS = 600.0
DEVIATION = 0.01  # of B's elements
SMOLLM2 = "smollm2"


def measure_scoring(quick: bool) -> Measurement:
    """Returns a row for each number of adapters, and the ratios."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        settings = home.make_home(Path(name), signed_requests="none", scorer_seconds=SECONDS)
        register(settings, source)
        (credentials,), token = home.add_devices(settings, 1), home.new_token(settings, Role.APP)
        with home.running_server(settings) as (url, _), home.client(url, token, SECONDS) as app:
            with Device(url, credentials) as device:
                for number in range(ADAPTERS):
                    body = home.job(number, {"rank": 16}, base=SMOLLM2)
                    publish(app, device, np.random.default_rng(number), body, DEVIATION)
            register(settings, model_file())
            seconds = _score(app, [f"adapter-{number}" for number in range(ADAPTERS)], rounds)
            with home.client(url, home.new_token(settings, Role.OPERATOR)) as operator:
                metrics = operator.get("/metrics").raise_for_status().text
    columns = {"what": "score", "rows": ADAPTERS}
    rows: list[Row] = [
        columns | {"adapters": count, "seconds": statistics.median(times), "all_seconds": times}
        for count, times in seconds.items()
    ]
    resident = re.search(r"^mobizo_scorer_resident_bytes (\S+)$", metrics, re.MULTILINE)
    claims = {
        "score_64_vs_1": ratio(seconds[ADAPTERS], seconds[1]),
        "score_8_vs_1": ratio(seconds[8], seconds[1]),
        "score_1_vs_base": ratio(seconds[1], seconds[0]),
        "score_rss_bytes": float(resident[1]) if resident else 0.0,
    }
    return rows, claims


def register(settings: Settings, source: Path) -> None:
    """Registers SmolLM2-135M in a home. source: the model, or a directory for the tests' compiler."""
    database, artifacts = Database(settings.url), open_artifacts(settings)
    base = inspect(SMOLLM2, str(model_file()), artifacts)
    if source.is_dir():
        (source / "shape.json").write_text(base.shape.model_dump_json())
        (source / "tokenizer.json").write_bytes(artifacts.read(base.tokenizer_sha256))
    base.source = str(source)
    with database.writing() as session:
        BaseService(session, artifacts).register(base)
    database.close()


def _score(app: httpx.Client, names: list[str], rounds: int) -> dict[int, list[float]]:
    """Returns the seconds of requests with ADAPTERS rows, for each number of adapters and each turn."""
    records = [json.loads(line) for line in (MOVIES / "test.jsonl").read_text().splitlines()]
    rng = random.Random(SEED)

    def make_call(count: int) -> Callable[[int], None]:
        def call(number: int) -> None:
            # All calls of a turn have the same sample.
            sample = random.Random(f"{SEED}-{number}").sample(records, ADAPTERS)
            rows = [
                {"adapter": names[row % count] if count else None, "record": {"text": record["text"]}}
                for row, record in enumerate(sample)
            ]
            rng.shuffle(rows)
            response = app.post("/v1/score", json={"base": SMOLLM2, "task": "sst2", "rows": rows}).raise_for_status()
            if len(response.json()["rows"]) != ADAPTERS:
                raise RuntimeError("rows are missing")

        return call

    counts = (ADAPTERS, 1, 8, 0)
    seconds = time_by_turns(rounds, {str(count): make_call(count) for count in counts})
    return {count: seconds[str(count)] for count in counts}


STEPS, QUERIES, SIZE = 1000, 4, 368_640  # D of SmolLM2-135M at rank 16 on q_proj and v_proj


def measure_replay(quick: bool) -> Measurement:
    """Returns a row for the verification and one for its reading, and the seconds of one verification."""
    data, start = _ledger(), np.zeros(SIZE, np.float32)
    adapter = replay(read_ledger(data), start).tobytes()

    def verify(_number: int) -> None:
        if replay(read_ledger(data), start).tobytes() != adapter:
            raise AssertionError("the replay does not yield the adapter")

    calls = {"verification": verify, "of these, reading": lambda _number: read_ledger(data)}
    rounds, cores = QUICK_ROUNDS if quick else ROUNDS, os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        seconds = time_by_turns(rounds, calls)
    finally:
        os.sched_setaffinity(0, cores)
    columns = {"what": "replay", "steps": STEPS, "queries": QUERIES, "size_d": SIZE, "rounds": rounds}
    rows: list[Row] = [columns | {"by": name, "seconds": statistics.median(times)} for name, times in seconds.items()]
    ratio = len(adapter) / len(data)
    rows.append({"what": "bytes", "trajectory": len(data), "adapter": len(adapter), "ratio": ratio})
    return rows, {"replay_seconds": rows[0]["seconds"], "adapter_vs_trajectory_bytes": ratio}


def _ledger() -> bytes:
    """Returns a run's file, with coefficients of the size that training yields."""
    recipe = {"recipe_id": "0" * 64, "noise": "rademacher", "queries": QUERIES, "size": SIZE}
    header = TrajectoryHeader(job_id="job", job_seed=SEED, **recipe)
    steps = np.random.default_rng(SEED).normal(scale=1e-4, size=(STEPS, QUERIES)).astype("<f4")
    frames = [frame(b"S", number, row.tobytes()) for number, row in enumerate(steps)]
    return b"".join([MAGIC, frame(b"H", 0, header.model_dump_json().encode()), *frames])


PARTS: Parts = {
    "publish": measure_publishing,
    "downloads": measure_downloads,
    "scoring": measure_scoring,
    "replay": measure_replay,
}
registry = command_of(PARTS, "Publish, download, score and replay adapters.")
