"""Server and workers killed with -9 at random moments under load, and started again: what was lost or done twice.

A real `mobizo-server run` with two workers, on SQLite with the embedded engine and on PostgreSQL with Procrastinate.
The compiler is the tests' own, which takes a moment: what is measured is what happens around it. A trial is one kill,
of the server (its workers die with it) or of one worker. At the end every job whose submission was answered must have
succeeded once, with one version of its adapter; every program must have been published once; and every file in the
store must have the hash that it is named by.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from sqlalchemy import func, select
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.kill_load import Load
from server import keys
from server.artifacts.opening import open_artifacts
from server.auth.models import Role
from server.auth.service import TokenService
from server.clock import utc_now
from server.db.database import Database
from server.db.schema import adapters, bases, jobs, programs, upgrade
from server.settings import Settings
from server.work.engine import prepare_engine
from shared.canonical import file_sha256
from shared.job import JobState
from shared.lora import BaseShape
from tests.postgres import Postgres
from tests.server import fake_compiler

KILLS, QUICK_KILLS = 100, 10  # over both databases
DEVICES, WORKERS = 6, 2
COMPILE_SECONDS = 0.2
SERVER_SHARE = 0.4  # of kills that hit the server, and all its workers with it
AT_ONCE = 0.3  # how often the next kill does not wait until the server answers again
PATIENCE = 300.0  # seconds for all jobs to end once nothing is killed any more
SEED = 5
SHAPE = BaseShape(
    architecture="llama",
    layers=2,
    hidden=8,
    intermediate=16,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocabulary=32,
    context_length=64,
)
Row = dict[str, Any]


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    """Rows of both databases, and the claims over both."""
    kills = (QUICK_KILLS if quick else KILLS) // 2
    rows = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        postgres = Postgres().start()
        stack.callback(postgres.remove)
        for engine, url in (("embedded", None), ("procrastinate", postgres.create("kills"))):
            rows.append(_measure(Path(name) / engine, engine, url, kills))
    names = ("kill_trials", "jobs_lost", "jobs_doubled", "torn_files")
    return rows, {name: float(sum(row[name] for row in rows)) for name in names}


def _measure(directory: Path, engine: Any, url: str | None, kills: int) -> Row:
    began = time.monotonic()
    settings = make_home(directory, engine, url)
    rng = random.Random(f"{SEED}-{engine}")
    with Victim(settings, directory / "log") as server:
        load = Load(server.url, _token(settings, Role.APP), _token(settings, Role.OPERATOR), DEVICES, SEED)
        try:
            killed = Counter(_kill(server, rng) for _ in range(kills))
            server.wait_until_answers()
            load.no_more_jobs()
            _wait_for_jobs(settings, load)
        finally:
            unanswered = load.stop()
        stopped = server.stop()
    found = audit(settings, load.submitted)
    return {
        "what": "server kills",
        "database": "sqlite" if url is None else "postgresql",
        "engine": engine,
        "kill_trials": kills,
        "servers_killed": killed["server"],
        "workers_killed": killed["worker"],
        "requests_sent_again": unanswered,
        "jobs": len(load.submitted),
        **found,
        "stopped_with": stopped,
        "seconds": time.monotonic() - began,
    }


def make_home(directory: Path, engine: Any = "embedded", url: str | None = None, shape: BaseShape = SHAPE) -> Settings:
    """A home as `init` makes it, with one base `tiny` of this shape that the tests' compiler takes."""
    source = directory / "source"
    source.mkdir(parents=True)
    words = {word: number for number, word in enumerate(("[UNK]", "It", "was", "terrible", "great"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # no secret
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "shape.json").write_text(shape.model_dump_json())
    (source / "behaviour.json").write_text(json.dumps({"seconds": COMPILE_SECONDS}))
    settings = Settings(
        home=directory / "home",
        database_url=url,
        engine=engine,
        poll_seconds=0.1,
        lease_seconds=4,
        compile_lease_seconds=4,
        compile_attempts=10_000,  # a worker that is killed counts as a try
        compile_backoff_seconds=0,
        token_rate=1e6,
        address_rate=1e6,
        refusal_rate=1e6,
        migrate_at_start=True,
        compiler_command=[sys.executable, fake_compiler.__file__],
    )
    settings.home.mkdir()
    keys.create_key(settings.key_path)
    database = Database(settings.url)
    upgrade(database.engine)
    prepare_engine(database, settings)
    with database.writing() as session:
        session.add(
            bases.BaseModelEntry(
                name="tiny",
                source=str(source),
                sha256="b" * 64,
                shape=shape,
                parameters=1000,
                tokenizer_sha256=open_artifacts(settings).put((source / "tokenizer.json").read_bytes()),
                created_at=utc_now(),
            )
        )
    database.close()
    return settings


def _token(settings: Settings, role: Role) -> str:
    database = Database(settings.url)
    with database.writing() as session:
        text = TokenService(session).issue(role, "default", "bench")[1]
    database.close()
    return text


class Victim:
    """A server that is started again on its port whenever it is killed."""

    def __init__(self, settings: Settings, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._settings, self._log = settings, log
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "server.cli", "run", "--port", str(self._port), "--workers", str(WORKERS)]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command, env=os.environ | self._settings.environment(), stdout=log, stderr=log, start_new_session=True
            )

    def workers(self) -> list[psutil.Process]:
        """Its worker processes; not the compilers that these started."""
        found = []
        with suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children():
                with suppress(psutil.Error):
                    if "server.worker" in child.cmdline():
                        found.append(child)
        return found

    def wait_until_answers(self) -> None:
        """Raises RuntimeError if the server does not come up."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/healthz").status_code == 200:
                    return
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended by itself: {self._log.read_text()[-3000:]}")
            time.sleep(0.05)
        raise RuntimeError("the server does not answer")

    def kill(self) -> None:
        """Kills the server -9, and starts it again."""
        self._process.kill()
        self._process.wait()
        self._process = self._start()

    def stop(self) -> int:
        """Stops it in order; its exit code."""
        self._process.terminate()
        return self._process.wait(PATIENCE)

    def __enter__(self) -> Victim:
        self.wait_until_answers()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def _kill(server: Victim, rng: random.Random) -> str:
    """One kill at a random moment; what was killed."""
    if rng.random() >= AT_ONCE:
        server.wait_until_answers()
    time.sleep(rng.uniform(0.1, 3.0))
    if rng.random() >= SERVER_SHARE:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if workers := server.workers():
                with suppress(psutil.NoSuchProcess):
                    rng.choice(workers).kill()
                    return "worker"
            time.sleep(0.02)
        raise RuntimeError("the server has no workers")
    server.kill()
    return "server"


def _wait_for_jobs(settings: Settings, load: Load) -> None:
    """Until every job has ended, or patience has: what has not ended by then counts as lost."""
    database = Database(settings.url)
    deadline = time.monotonic() + PATIENCE
    statement = (
        select(func.count()).select_from(jobs.Job).where(jobs.Job.state.in_([s for s in JobState if not s.final]))
    )
    while time.monotonic() < deadline and not load.errors:
        with database.reading() as session:
            if session.scalar(statement) == 0:
                break
        threading.Event().wait(0.2)
    database.close()
    if load.errors:
        raise RuntimeError(f"the load met what it must not: {load.errors[0]}")


def audit(settings: Settings, submitted: dict[str, str]) -> Row:
    """What became of what was asked for."""
    database = Database(settings.url)
    with database.reading() as session:
        found = {job.id: job for job in session.scalars(select(jobs.Job))}
        by_adapter = Counter(job.adapter for job in found.values())
        successes = Counter(
            session.scalars(
                select(jobs.JobEvent.job_number).where(
                    jobs.JobEvent.kind == "job", jobs.JobEvent.data.contains('"state":"succeeded"')
                )
            )
        )
        versions = Counter(session.scalars(select(adapters.StoredVersion.job_id)))
        made = session.scalars(select(programs.Program)).all()
        again = sum(program.signed is not None and program.signed.manifest.version != 1 for program in made)
        named = set(session.scalars(select(programs.ProgramBlob.sha256)))
        named |= set(session.scalars(select(adapters.StoredVersion.sha256)))
    database.close()
    lost = [
        job_id
        for job_id, adapter in submitted.items()
        if job_id not in found or found[job_id].state is not JobState.SUCCEEDED or found[job_id].adapter != adapter
    ]
    doubled = [
        job.id
        for job in found.values()
        if by_adapter[job.adapter] > 1 or successes[job.number] > 1 or versions[job.id] > 1
    ]
    stored = [path for path in settings.artifacts_path.rglob("*") if re.fullmatch(r"[0-9a-f]{64}", path.name)]
    torn = [path for path in stored if path.is_file() and file_sha256(path) != path.name]
    missing = named - {path.name for path in stored}
    return {
        "jobs_lost": len(lost),
        "jobs_doubled": len(doubled),
        "programs": len(made),
        "programs_made_again": again,
        "files": len(stored),
        "torn_files": len(torn) + len(missing),
    }
