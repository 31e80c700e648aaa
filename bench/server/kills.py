"""`bench server`, kills: server and workers killed with -9 at random moments under load, and started again.

A real `mobizo-server run` with two workers, on SQLite with the embedded engine and on PostgreSQL with Procrastinate.
The tests' compiler needs only a moment, so most of the time is spent around it. A trial is one kill, of the server (its
workers die with it) or of one worker. At the end every job whose submission was answered must have succeeded once, with
one version of its adapter; every program must have been published once; and every file in the store must match the hash
in its name.
"""

import json
import random
import re
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import select

from bench.result import Measured, Row
from bench.server import home
from bench.server.polls import Orders, start_load
from server.database.database import Database
from server.schema import adapters, jobs, programs
from server.settings import Settings
from shared.access import Role
from shared.canonical import file_sha256
from shared.job import JobState
from tests.server.homes import eventually
from tests.server.nginx import free_ports

KILLS, QUICK_KILLS = 100, 10  # over both databases
DEVICES, WORKERS = 6, 2
SERVER_SHARE = 0.4  # of kills that hit the server, and all its workers with it
AT_ONCE = 0.3  # share of kills that do not wait until the server answers again
SEED = 5
SETTINGS: dict[str, Any] = {
    "poll_seconds": 0.1,
    "lease_seconds": 4,
    "compile_lease_seconds": 4,
    "compile_attempts": 10_000,  # a killed worker counts as an attempt
    "compile_backoff_seconds": 0,
}


def measure(quick: bool) -> Measured:
    """Returns a row for each database, and the claims over both."""
    kills = (QUICK_KILLS if quick else KILLS) // 2
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, home.both_databases("kills") as databases:
        for (kind, url), engine in zip(databases, ("embedded", "procrastinate"), strict=True):
            settings = home.make_home(Path(name) / engine, database_url=url, engine=engine, **SETTINGS)
            about = {"what": "server kills", "database": kind, "engine": engine}
            rows.append(about | _measure(settings, kills))
    names = ("kill_trials", "jobs_lost", "jobs_doubled", "torn_files")
    return rows, {name: float(sum(row[name] for row in rows)) for name in names}


def _measure(settings: Settings, kills: int) -> Row:
    began, rng = time.monotonic(), random.Random(f"{SEED}-{settings.engine}")
    devices, token = home.add_devices(settings, DEVICES), home.new_token(settings, Role.APP)
    with closing(Victim(settings)) as server:
        orders = Orders(url=server.url, app=token, devices=devices, vanish=0.05, retry=True, jobs_per_recipe=6)
        load = start_load(orders)
        assert load.stdin is not None
        try:
            killed = Counter(_kill(server, rng) for _ in range(kills))
            server.wait_until_answers()
            load.stdin.write("enough\n")
            load.stdin.flush()
            _wait_for_jobs(settings)
        finally:
            found = json.loads(load.communicate("stop\n")[0])
        stopped = server.stop()
    if found["errors"]:
        raise RuntimeError(f"the load got an answer that it should not get: {found['errors'][0]}")
    return {
        "kill_trials": kills,
        "servers_killed": killed["server"],
        "workers_killed": killed["worker"],
        "requests_sent_again": found["sent_again"],
        "jobs": len(found["submitted"]),
        **audit(settings, found["submitted"]),
        "stopped_with": stopped,
        "seconds": time.monotonic() - began,
    }


class Victim:
    """A server that is started again on its port after each kill."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._port = settings, free_ports(1)[0]
        self._process = home.start_server(settings, self._port, WORKERS)
        self.url = self.wait_until_answers()

    def wait_until_answers(self) -> str:
        """Returns the URL. Raises RuntimeError if the server does not start."""
        return home.wait_until_answers(self._settings, self._port, self._process)

    def workers(self) -> list[psutil.Process]:
        """Returns its worker processes, without the compilers that these started."""
        found = []
        with suppress(psutil.Error):
            for child in self._process.children():
                with suppress(psutil.Error):
                    if "server.worker" in child.cmdline():
                        found.append(child)
        return found

    def kill(self) -> None:
        """Kills the server with -9, and starts it again."""
        self._process.kill()
        self._process.wait()
        self._process = home.start_server(self._settings, self._port, WORKERS)

    def stop(self) -> int:
        """Stops the server in order; returns its exit status."""
        self._process.terminate()
        return int(self._process.wait(home.PATIENCE))

    def close(self) -> None:
        """Kills the server if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _kill(server: Victim, rng: random.Random) -> str:
    """Kills something at a random moment; returns what."""
    if rng.random() >= AT_ONCE:
        server.wait_until_answers()
    time.sleep(rng.uniform(0.1, 3.0))
    if rng.random() < SERVER_SHARE:
        server.kill()
        return "server"
    while True:
        with suppress(psutil.NoSuchProcess):
            rng.choice(eventually(server.workers, home.PATIENCE)).kill()
            return "worker"


def _wait_for_jobs(settings: Settings) -> None:
    """Waits until every job has ended; jobs that have not ended after PATIENCE count as lost."""
    database, deadline = Database(settings.url), time.monotonic() + home.PATIENCE
    unfinished = select(jobs.Job.id).where(jobs.Job.state.in_([state for state in JobState if not state.final]))
    left: str | None = ""
    while left is not None and time.monotonic() < deadline:
        time.sleep(0.2)
        with database.reading() as session:
            left = session.scalar(unfinished.limit(1))
    database.close()


def audit(settings: Settings, submitted: dict[str, str]) -> Row:
    """Counts what was lost, done twice or torn. submitted: adapters by the id of the job that was answered."""
    database = Database(settings.url)
    with database.reading() as session:
        found = {job.id: job for job in session.scalars(select(jobs.Job))}
        by_adapter = Counter(job.adapter for job in found.values())
        succeeded = jobs.JobEvent.data.contains('"state":"succeeded"')
        events = select(jobs.JobEvent.job_number).where(jobs.JobEvent.kind == "job", succeeded)
        successes = Counter(session.scalars(events))
        versions = Counter(session.scalars(select(adapters.StoredVersion.job_id)))
        compiled = session.scalars(select(programs.Program)).all()
        again = sum(program.signed is not None and program.signed.manifest.version != 1 for program in compiled)
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
        "programs": len(compiled),
        "programs_made_again": again,
        "files": len(stored),
        "torn_files": len(torn) + len(missing),
    }
