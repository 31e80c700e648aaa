"""Many downloads of weights at once: our time over nginx's for the same files, in the same run, in turns.

`stream`: through `mobizo-server run`, which asks its database who may have what. `accel`: by an nginx with
deploy/nginx.conf in front of it, in clear. `nginx`: the files as they lie, with no questions asked. The readers are
processes of their own (bench.reader). Memory is the server's highest resident set since it started, bytes.
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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from bench.server_kills import make_home
from server.artifacts.disk import DiskArtifacts
from server.artifacts.opening import open_artifacts
from server.auth.models import Role
from server.auth.service import TokenService
from server.db.database import Database
from server.db.schema import programs
from server.settings import Delivery, Settings
from tests.server.nginx import Missing, free_ports, nginx

DOWNLOADS, QUICK_DOWNLOADS = 200, 50
FILE_BYTES, FILES = 25_000_000, 4
ROUNDS, QUICK_ROUNDS = 3, 1
READERS = 2  # processes
PATIENCE = 120.0
JOB = {"base": "tiny", "user": "u", "adapter": "a", "task": "sst2", "dataset": "d"}
SHIPPED = Path(__file__).parents[1] / "deploy" / "nginx.conf"
SEED = 5
Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where files may be had. sets: each download fetches one of them, in turn; of each file, path and bytes."""

    name: str
    port: int
    sets: tuple[tuple[tuple[str, int], ...], ...]
    headers: str = ""

    def bytes(self, downloads: int) -> int:
        """Of so many downloads."""
        return sum(size for number in range(downloads) for _, size in self.sets[number % len(self.sets)])


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    """One row for each source, and the ratios of their median times."""
    downloads, rounds = (QUICK_DOWNLOADS, QUICK_ROUNDS) if quick else (DOWNLOADS, ROUNDS)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        settings = make_home(root).model_copy(update={"delivery": Delivery.ACCEL})
        with serving(settings) as (pid, port):
            token, files = _publish(settings, port)
            bearer = f"Authorization: Bearer {token}\r\n"
            asked = tuple(((f"/v1/files/{file}", FILE_BYTES),) for file in files)
            lying = tuple(((f"/{DiskArtifacts.name(file)}", FILE_BYTES),) for file in files)
            ours = Source("stream", port, asked, bearer)
            idle = peak_memory(pid)
            try:
                with front(root, settings, port) as (plain, accel):
                    static = Source("nginx", plain, lying)
                    fronted = Source("accel", accel, asked, bearer)
                    seconds = race((static, ours, fronted), downloads, rounds)
            except Missing as error:
                return [{"what": "downloads", "skipped": str(error)}], {}
            peak = peak_memory(pid)
    rows: list[Row] = [
        {
            "what": "downloads",
            "by": source.name,
            "downloads": downloads,
            "file_bytes": FILE_BYTES,
            "seconds": statistics.median(seconds[source]),
            "all_seconds": seconds[source],
            "bytes_per_second": downloads * FILE_BYTES / statistics.median(seconds[source]),
        }
        for source in seconds
    ]
    rows.append({"what": "memory while downloading", "before_bytes": idle, "peak_rss_bytes": peak})
    static_seconds = statistics.median(seconds[static])
    return rows, {
        "download_vs_nginx": statistics.median(seconds[ours]) / static_seconds,
        "download_accel_vs_nginx": statistics.median(seconds[fronted]) / static_seconds,
        "download_rss_bytes": float(peak),
    }


@contextmanager
def serving(settings: Settings) -> Iterator[tuple[int, int]]:
    """`mobizo-server run` with a worker: process id and port."""
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
        yield process.pid, int(found[1])
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _publish(settings: Settings, port: int) -> tuple[str, list[str]]:
    """An app's token, and the sha256 of files that it may have: large ones, added to a program that it asked for."""
    database, artifacts = Database(settings.url), open_artifacts(settings)
    with database.writing() as session:
        token = TokenService(session).issue(Role.APP, "default", "bench")[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {token}"}) as app:
        job = app.post("/v1/jobs", json=JOB).raise_for_status().json()
        deadline = time.monotonic() + PATIENCE
        while app.get(f"/v1/jobs/{job['id']}").json()["state"] != "ready":
            if time.monotonic() > deadline:
                raise RuntimeError("the program is not compiled")
            time.sleep(0.1)
    rng = random.Random(SEED)
    files = [artifacts.put(rng.randbytes(FILE_BYTES)) for _ in range(FILES)]
    with database.writing() as session:
        for number, sha256 in enumerate(files):
            session.add(
                programs.ProgramBlob(
                    recipe_id=job["recipe_id"], version=1, role=f"extra{number}", name=f"{number}.ptd", sha256=sha256
                )
            )
    database.close()
    return token, files


@contextmanager
def front(root: Path, settings: Settings, port: int) -> Iterator[tuple[int, int]]:
    """An nginx: the port where it sends the files as they lie, and the one where it asks the server first.

    Raises Missing.
    """
    objects = settings.artifacts_path / "objects"
    plain, accel, unused = free_ports(3)
    shipped = SHIPPED.read_text()
    for old, new in (
        ("server 127.0.0.1:8000;", f"server 127.0.0.1:{port};"),
        ("listen 80;", f"listen 127.0.0.1:{unused};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{accel};"),
        ("/var/lib/mobizo/server/artifacts/objects/;", f"{objects}/;"),
        ("limit_conn mobizo_downloads 32;", ""),  # all readers have one address
    ):
        if shipped.count(old) != 1:
            raise RuntimeError(f"deploy/nginx.conf has no line {old!r} of its own any more")
        shipped = shipped.replace(old, new)
    shipped = re.sub(r"^ *ssl_.*\n", "", shipped, flags=re.MULTILINE)
    static = f"server {{ listen 127.0.0.1:{plain}; location / {{ alias {objects}/; }} }}\n"
    with nginx(root / "nginx", static + shipped, plain):
        yield plain, accel


def race(sources: tuple[Source, ...], downloads: int, rounds: int) -> dict[Source, list[float]]:
    """Seconds of each round, the sources taking turns."""
    seconds: dict[Source, list[float]] = {source: [] for source in sources}
    for _ in range(rounds):
        for source in sources:
            seconds[source].append(_read(source, downloads))
    return seconds


def _read(source: Source, downloads: int) -> float:
    """Seconds from the first reader's begin to the last one's end."""
    lists = [source.sets[number % len(source.sets)] for number in range(downloads)]
    plan = {"host": "127.0.0.1", "port": source.port, "headers": source.headers}
    readers = [_reader(plan | {"downloads": lists[number::READERS]}) for number in range(READERS)]
    for _, given, _ in readers:
        given.write("go\n")
        given.flush()
    told = []
    for reader, _, _ in readers:
        out, _ = reader.communicate()
        if reader.returncode != 0:
            raise RuntimeError(f"a reader of {source.name} failed")
        told.append(json.loads(out))
    if sum(each["bytes"] for each in told) != source.bytes(downloads):
        raise RuntimeError(f"{source.name} sent other files than it was asked for")
    return float(max(each["ended"] for each in told) - min(each["began"] for each in told))


def _reader(plan: dict[str, Any]) -> tuple[subprocess.Popen[str], IO[str], IO[str]]:
    """A reader that is ready to begin, with its input and output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.reader"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(plan) + "\n")
    process.stdin.flush()
    process.stdout.readline()
    return process, process.stdin, process.stdout


def peak_memory(pid: int) -> int:
    """The highest resident set of a process, bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0
