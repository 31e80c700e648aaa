"""A PEFT directory by the Hub-compatible route: our time over nginx's for the same files, in the same run, in turns.

One adapter of a 1.1B Llama's shape (D = 6.3 million), published over HTTP by a device that only pretends to train. Each
download fetches every file of the directory on one connection. `stream`: through `mobizo-server run`, which asks its
database who may have what. `accel`: by an nginx with deploy/nginx.conf in front of it. `nginx`: the files as they lie,
with no questions asked. `snapshot_download`: the stock client, one directory at a time, into an empty cache.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import HfApi, snapshot_download

from bench.server_downloads import Source, front, peak_memory, race, serving
from bench.server_kills import make_home
from device_agent.client import DeviceClient
from mobizo import Client
from server.artifacts.disk import DiskArtifacts
from server.auth.service import DEFAULT_TENANT, TokenService
from server.db.database import Database
from server.settings import Delivery, Settings
from shared.access import Role, TokenRequest
from shared.canonical import sha256_hex
from shared.job import JobRequest, JobState, Result
from shared.lora import BaseShape, dump_adapter
from shared.recipe import TARGETS
from shared.signing import new_private_key, public_text
from tests.server.nginx import Missing

DOWNLOADS, QUICK_DOWNLOADS = 40, 8  # at once
ROUNDS, QUICK_ROUNDS = 5, 1
SNAPSHOTS, QUICK_SNAPSHOTS = 5, 1
PATIENCE = 120.0
SEED = 6
LLAMA_1B = BaseShape(
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
DATASET, ADAPTER = "reviews", "alice-reviews"
JOB = JobRequest.model_validate(
    {
        "base": "tiny",
        "user": "alice",
        "adapter": ADAPTER,
        "task": "sst2",
        "dataset": DATASET,
        "recipe": {"rank": 16, "targets": list(TARGETS), "sequence_length": 16},
    }
)
RESULT = Result(
    steps=150,
    best_step=150,
    train_seconds=1,
    seconds=1,
    peak_rss_bytes=1,
    train_examples=100,
    truncated_examples=0,
    zero_shot_accuracy=0.5,
    tuned_accuracy=0.75,
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """An adapter, and whose token may read it. files: (path, bytes, sha256) of its PEFT directory."""

    token: str
    repository: str
    revision: str
    files: tuple[tuple[str, int, str], ...]

    def paths(self, lying: bool) -> tuple[tuple[str, int], ...]:
        """Where each file is asked for, and its bytes. lying: as it lies in the store, else by the Hub's route."""
        return tuple(
            (f"/{DiskArtifacts.name(sha256)}" if lying else f"/{self.repository}/resolve/{self.revision}/{path}", size)
            for path, size, sha256 in self.files
        )


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    """One row for each source, and the ratios of their median times."""
    downloads, rounds = (QUICK_DOWNLOADS, QUICK_ROUNDS) if quick else (DOWNLOADS, ROUNDS)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        settings = make_home(root, shape=LLAMA_1B).model_copy(update={"delivery": Delivery.ACCEL})
        with serving(settings) as (pid, port):
            found = publish(f"http://127.0.0.1:{port}", operator_of(settings), JOB)
            bearer = f"Authorization: Bearer {found.token}\r\n"
            ours = Source("stream", port, (found.paths(lying=False),), bearer)
            idle = peak_memory(pid)
            try:
                with front(root, settings, port) as (plain, accel):
                    static = Source("nginx", plain, (found.paths(lying=True),))
                    fronted = Source("accel", accel, ours.sets, bearer)
                    seconds = race((static, ours, fronted), downloads, rounds)
            except Missing as error:
                return [{"what": "directory downloads", "skipped": str(error)}], {}
            stock = _snapshots(found, port, root, QUICK_SNAPSHOTS if quick else SNAPSHOTS)
            peak = peak_memory(pid)
    size = ours.bytes(1)
    rows: list[Row] = [
        {
            "what": "directory downloads",
            "by": source.name,
            "downloads": downloads,
            "directory_bytes": size,
            "files": len(found.files),
            "seconds": statistics.median(taken),
            "all_seconds": taken,
            "bytes_per_second": downloads * size / statistics.median(taken),
        }
        for source, taken in seconds.items()
    ]
    rows.append({"what": "snapshot_download", "seconds": statistics.median(stock), "all_seconds": stock})
    rows.append({"what": "memory while downloading", "before_bytes": idle, "peak_rss_bytes": peak})
    ratios = {
        source: statistics.median(taken) / statistics.median(seconds[static]) for source, taken in seconds.items()
    }
    return rows, {"download_vs_nginx": ratios[ours], "download_accel_vs_nginx": ratios[fronted]}


def publish(url: str, operator_token: str, job: JobRequest) -> Published:
    """A version of an adapter with a random B, through the routes that a device has; the token is an app's."""
    with Client(url, operator_token) as operator, _device(url, operator) as device:
        deadline = time.monotonic() + PATIENCE
        submitted = operator.submit(job)
        while operator.job(submitted.id).state is not JobState.READY:
            if time.monotonic() > deadline:
                raise RuntimeError("the program is not compiled")
            time.sleep(0.1)
        lease = device.lease([job.dataset])
        if lease is None:
            raise RuntimeError("the device is not offered the job")
        flat = np.random.default_rng(SEED).standard_normal(lease.manifest.manifest.size).astype(np.float32) / 100
        data = dump_adapter(flat, {"job": submitted.id})
        device.upload(lease.id, data)
        device.complete(lease.id, sha256_hex(data), RESULT)
        token = operator.make_token(TokenRequest(name="reader", role=Role.APP)).token
        tenant = operator.whoami().tenant
    repository = f"{tenant}/{job.adapter}"
    info = HfApi(url, token).model_info(repository, files_metadata=True)
    files = [(file.rfilename, file.size, file.lfs and file.lfs.sha256) for file in info.siblings or ()]
    whole = tuple((path, size, sha256) for path, size, sha256 in files if size is not None and sha256 is not None)
    if len(whole) != len(files) or info.sha is None:
        raise RuntimeError(f"the listing does not say what each file is: {files}")
    return Published(token, repository, info.sha, whole)


def operator_of(settings: Settings) -> str:
    """An operator's token."""
    database = Database(settings.url)
    with database.writing() as session:
        token = TokenService(session).issue(Role.OPERATOR, DEFAULT_TENANT, "bench")[1]
    database.close()
    return token


@contextmanager
def _device(url: str, operator: Client) -> Iterator[DeviceClient]:
    """A device that has just joined."""
    key = new_private_key()
    with DeviceClient(url, operator.enrolment().token) as joining:
        grant = joining.enrol("phone", public_text(key.public_key()))
    with DeviceClient(url, grant.token, key) as device:
        yield device


def _snapshots(found: Published, port: int, root: Path, times: int) -> list[float]:
    """Seconds of each time that the stock client takes the directory, hashes and cache included."""
    seconds = []
    for number in range(times):
        began = time.perf_counter()
        snapshot_download(
            found.repository,
            endpoint=f"http://127.0.0.1:{port}",
            token=found.token,
            cache_dir=root / f"cache-{number}",
        )
        seconds.append(time.perf_counter() - began)
    return seconds
