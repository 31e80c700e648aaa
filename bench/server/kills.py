"""`bench server`, kills: server and workers killed with -9 at random moments under load, and started again.

A real `mobizo-server run` with two workers, on SQLite and on PostgreSQL. The tests' compiler needs only a moment, so
most of the time is spent around it. A trial is one kill, of the server (its workers die with it) or of one worker. At
the end every job whose submission was answered must have succeeded once, with one version of its adapter, and every
file in the store must match the hash in its name.
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

from bench.result import Measurement, Row
from bench.server import home
from bench.server.polls import LoadSettings, start_load
from server.database.database import Database
from server.jobs import repository as jobs
from server.programs import service as programs
from server.registry import models as adapters
from server.settings import Settings
from shared.access import Role
from shared.canonical import file_sha256
from shared.job import JobState
from tests.server.homes import eventually

KILLS, QUICK_KILLS = 100, 10  # over both databases
DEVICES, WORKERS = 6, 2
SERVER_SHARE = 0.4  # share of kills that hit the server, and all its workers with it
IMMEDIATE_SHARE = 0.3  # share of kills that do not wait until the server answers again
SEED = 5
SETTINGS: dict[str, Any] = {
    "poll_seconds": 0.1,
    "lease_seconds": 4,
    "compile_lease_seconds": 4,
    "compile_attempts": 10_000,  # a killed worker counts as an attempt
}


def measure(quick: bool) -> Measurement:
    """Returns a row for each database, and the claims over both."""
    kills = (QUICK_KILLS if quick else KILLS) // 2
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, home.both_databases("kills") as databases:
        for kind, url in databases:
            settings = home.make_home(Path(name) / kind, database_url=url, **SETTINGS)
            rows.append({"what": "server kills", "database": kind} | _measure(settings, kind, kills))
    names = ("kill_trials", "jobs_lost", "jobs_doubled", "torn_files")
    return rows, {name: float(sum(row[name] for row in rows)) for name in names}


def _measure(settings: Settings, kind: str, kills: int) -> Row:
    rng = random.Random(f"{SEED}-{kind}")
    devices, token = home.add_devices(settings, DEVICES), home.new_token(settings, Role.APP)
    with closing(home.ServerProcess(settings, WORKERS)) as server:
        load_settings = LoadSettings(
            url=server.url, app=token, devices=devices, abandon_share=0.05, retry=True, jobs_per_recipe=6
        )
        load = start_load(load_settings)
        assert load.stdin is not None
        try:
            for _ in range(kills):
                _kill(server, rng)
            server.wait_until_answers()
            load.stdin.write("enough\n")
            load.stdin.flush()
            _wait_for_jobs(settings)
        finally:
            report = json.loads(load.communicate("stop\n")[0])
    if report["errors"]:
        raise RuntimeError(f"the load got an unexpected response: {report['errors'][0]}")
    return {"kill_trials": kills, "jobs": len(report["submitted"]), **audit(settings, report["submitted"])}


def _workers(server: home.ServerProcess) -> list[psutil.Process]:
    """Returns the server's worker processes, without the compilers that these started."""
    workers = []
    with suppress(psutil.Error):
        for child in server.process.children():
            with suppress(psutil.Error):
                if "server.worker" in child.cmdline():
                    workers.append(child)
    return workers


def _kill(server: home.ServerProcess, rng: random.Random) -> None:
    """Kills the server or a worker at a random moment."""
    if rng.random() >= IMMEDIATE_SHARE:
        server.wait_until_answers()
    time.sleep(rng.uniform(0.1, 3.0))
    if rng.random() < SERVER_SHARE:
        server.process.kill()
        server.process.wait()
        server.start()
        return
    while True:
        with suppress(psutil.NoSuchProcess):
            rng.choice(eventually(lambda: _workers(server), home.TIMEOUT_SECONDS)).kill()
            return


def _wait_for_jobs(settings: Settings) -> None:
    """Waits until every job has ended; jobs that have not ended after TIMEOUT_SECONDS count as lost."""
    database, deadline = Database(settings.url), time.monotonic() + home.TIMEOUT_SECONDS
    unfinished = select(jobs.Job.id).where(jobs.Job.state.in_([state for state in JobState if not state.final]))
    unfinished_id: str | None = ""
    while unfinished_id is not None and time.monotonic() < deadline:
        time.sleep(0.2)
        with database.reading() as session:
            unfinished_id = session.scalar(unfinished.limit(1))
    database.close()


def audit(settings: Settings, submitted: dict[str, str]) -> Row:
    """Counts lost jobs, jobs done twice and damaged files. submitted: adapter by the id of each acknowledged job."""
    database = Database(settings.url)
    with database.reading() as session:
        jobs_by_id = {job.id: job for job in session.scalars(select(jobs.Job))}
        by_adapter = Counter(job.adapter for job in jobs_by_id.values())
        succeeded = jobs.JobEvent.data.contains('"state":"succeeded"')
        events = select(jobs.JobEvent.job_number).where(jobs.JobEvent.kind == "job", succeeded)
        successes = Counter(session.scalars(events))
        versions = Counter(session.scalars(select(adapters.StoredVersion.job_id)))
        referenced = set(session.scalars(select(programs.ProgramBlob.sha256)))
        referenced |= set(session.scalars(select(adapters.StoredVersion.sha256)))
    database.close()
    lost_jobs = [
        job_id
        for job_id, adapter in submitted.items()
        if job_id not in jobs_by_id
        or jobs_by_id[job_id].state is not JobState.SUCCEEDED
        or jobs_by_id[job_id].adapter != adapter
    ]
    doubled = [
        job.id
        for job in jobs_by_id.values()
        if by_adapter[job.adapter] > 1 or successes[job.number] > 1 or versions[job.id] > 1
    ]
    stored = [path for path in settings.artifacts_path.rglob("*") if re.fullmatch(r"[0-9a-f]{64}", path.name)]
    torn = [path for path in stored if path.is_file() and file_sha256(path) != path.name]
    missing = referenced - {path.name for path in stored}
    return {
        "jobs_lost": len(lost_jobs),
        "jobs_doubled": len(doubled),
        "torn_files": len(torn) + len(missing),
    }
