"""A database that goes away, and comes back: nobody hangs, nothing is lost, and all go on by themselves."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select

from server.jobs.leases.long_poll import make_long_poll
from server.jobs.repository import Job, JobEvent
from server.settings import Settings, Tuning
from tests.postgres import Postgres
from tests.server.actors import assert_problem
from tests.server.conftest import BOTH
from tests.server.homes import copy_home, eventually, fill, home_of

DATABASES = BOTH[1:]
HANGING = 15  # seconds; a client that waits longer than this for a refusal has been left hanging


@pytest.fixture(scope="module")
def own():
    """A PostgreSQL of these tests alone, which keeps what it said it has kept."""
    server = Postgres(synchronous_commit="on")
    yield server
    server.remove()


@pytest.fixture
def database_server(own):
    """The same, running; a test may stop it."""
    yield own.start()
    own.stop()


@pytest.fixture
def home(home_template, database_server, tmp_path):
    root = tmp_path / "server"
    settings = copy_home(home_template, root, database_server.empty("home"))
    fill(settings, (root / "source" / "tokenizer.json").read_bytes())
    with home_of(settings, root / "source") as new_home:
        yield new_home


def test_requests_are_refused_while_it_is_away_and_go_on_as_it_is_back(database_server, fleet, app, device, lease):
    beat = {"phase": "training", "step": 1, "steps": 3}
    app.timeout = device.timeout = HANGING
    database_server.stop()
    for response in (
        app.get("/v1/jobs"),
        app.get(f"/v1/jobs/{lease['job']['id']}"),
        app.post("/v1/jobs", json={}),
        device.post("/v1/leases", json={"datasets": ["movies"]}),
        device.post(f"/v1/leases/{lease['id']}/heartbeat", json=beat),
        device.put(f"/v1/leases/{lease['id']}/adapter", content=b"x"),
    ):
        assert_problem(response, 503, "unavailable")
        assert int(response.headers["retry-after"]) > 0
    assert fleet.actor().get("/healthz").status_code == 200
    assert fleet.actor().get("/readyz").status_code == 503
    database_server.start()
    assert fleet.actor().get("/readyz").status_code == 200
    assert device.post(f"/v1/leases/{lease['id']}/heartbeat", json=beat).status_code == 200
    assert device.finish(lease)["version"] == 1
    assert app.get(f"/v1/jobs/{lease['job']['id']}").json()["state"] == "succeeded"


def test_who_waits_and_who_watches_go_on(database_server, standing, home, fleet, app, device):
    """A device that waits for work gets it, and a stream of events ends with its job."""
    event_ids, stop_event = [], threading.Event()
    long_poll = standing[0].state.mobizo.get(make_long_poll)

    def watch(job_id):
        with app.stream("GET", f"/v1/jobs/{job_id}/events", timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("id: "):
                    event_ids.append(int(line.removeprefix("id: ")))
                if stop_event.is_set():
                    return

    job = app.submit(dataset="other")
    with ThreadPoolExecutor(2) as pool:
        watching = pool.submit(watch, job["id"])
        waiting = pool.submit(device.post, "/v1/leases", json={"datasets": ["movies"], "wait_seconds": 30}, timeout=60)
        try:
            eventually(lambda: event_ids and len(long_poll) == 1)  # then time for several polls that find nothing
            time.sleep(0.5)
            database_server.stop()
            time.sleep(1)
            database_server.start()
            other_app = fleet.actor(app.token)
            ready = fleet.ready_job(other_app)
            assert waiting.result().json()["job"]["id"] == ready["id"]
            assert other_app.post(f"/v1/jobs/{job['id']}/cancel").status_code == 200
            watching.result()
        finally:
            stop_event.set()
    assert event_ids == list(range(1, len(event_ids) + 1))
    assert other_app.get(f"/v1/jobs/{job['id']}").json()["state"] == "cancelled"


def test_a_worker_lives_through_it(database_server, home, fleet, app, start_worker):
    home.behave(seconds=3)
    worker = start_worker(compile_lease_seconds=2)
    job = app.submit()
    eventually(home.starts)
    database_server.stop()
    time.sleep(1)
    database_server.start()
    eventually(lambda: app.get(f"/v1/jobs/{job['id']}").json()["state"] == "ready")
    assert worker.is_alive()
    assert len(home.starts()) == 1
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0


def test_crashes_of_the_database_under_load_lose_nothing_that_was_answered(database_server, home, fleet, app):
    fleet.ready_job(app)
    stopping = threading.Event()
    job_ids, codes = [], set()

    def submit(number):
        actor = fleet.actor(app.token)
        while not stopping.is_set():
            name = f"user-{number}"
            body = {"base": "tiny", "user": name, "adapter": name, "task": "sst2", "dataset": "movies"}
            response = actor.post("/v1/jobs", json=body | {"recipe": {"sequence_length": 16}})
            codes.add(response.status_code)
            if response.status_code == 202:
                job_ids.append(response.json()["id"])

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(submit, number) for number in range(4)]
        for _ in range(3):
            count = len(job_ids)
            eventually(lambda count=count: len(job_ids) > count + 5)
            database_server.stop(signal.SIGQUIT)
            database_server.start()
        eventually(lambda: app.get("/v1/jobs").status_code == 200)
        stopping.set()
        for thread in threads:
            thread.result()
    assert codes <= {202, 503}
    with home.database.reading() as session:
        jobs = session.scalars(select(Job)).all()
        assert {job.id for job in jobs} >= set(job_ids)
        for job in jobs:
            positions = session.scalars(select(JobEvent.position).where(JobEvent.job_number == job.number)).all()
            assert sorted(positions) == list(range(1, job.events + 1))


def test_a_server_without_its_database_says_so_at_once(database_server, home):
    database_server.stop()
    environment = os.environ | home.settings.environment()
    command = [sys.executable, "-m", "server.cli.main", "tenant", "list"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    assert "database cannot be reached" in process.stderr
    assert len(process.stderr.strip().splitlines()) == 1
    assert "Traceback" not in process.stderr


class TestOnSqlite:
    """Another process that keeps the file's lock, such as a backup or a shell that was left open."""

    @pytest.fixture
    def home(self, home_template, tmp_path, monkeypatch):
        root = tmp_path / "server"
        monkeypatch.setattr(Settings, "tuning", Tuning(lock_seconds=0.2))
        with home_of(copy_home(home_template, root, None), root / "source") as new_home:
            yield new_home

    def test_writers_are_refused_past_the_busy_timeout_and_readers_go_on(self, home, fleet, app):
        job = app.submit()
        other = sqlite3.connect(home.settings.home / "mobizo.sqlite3", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        response = app.post(f"/v1/jobs/{job['id']}/cancel")
        assert_problem(response, 503, "unavailable")
        assert response.headers["retry-after"]
        assert app.get(f"/v1/jobs/{job['id']}").json()["state"] == "queued"
        other.execute("ROLLBACK")
        other.close()
        assert app.post(f"/v1/jobs/{job['id']}/cancel").json()["state"] == "cancelled"
