"""What fails inside a task or a sweep ends there, with its own reason; no worker dies and no work is lost."""

import errno
import sqlite3
import threading
from datetime import timedelta

import pytest
from sqlalchemy import make_url, select

from server.database.columns import utc_now
from server.database.database import Database
from server.federation.models import Cohort
from server.federation.rounds import RoundService
from server.settings import Tuning
from server.storage.directory import DiskArtifacts
from server.tasks import requests
from server.tasks.child_process import Stopped
from server.tasks.handlers import Handler
from server.tasks.queue import MAX_OUTAGE
from server.tasks.repository import Task, WorkerProcess
from server.tasks.sweeps import SweepFailure, run_guarded
from server.worker import create_worker
from shared.errors import MobizoError, Unavailable
from tests.server.federation.conftest import band  # noqa: F401  # a fixture
from tests.server.homes import drain, eventually, sweep


class Attempts(Handler):
    """A kind of task whose attempts do what a test says."""

    kind, subject_name = "attempt", "subject"

    def __init__(self):
        self.outcomes, self.failed, self.waited, self.runs, self.beats, self.published = [], [], [], 0, [], []

    def begin(self, session, subject):
        return subject

    def heartbeat(self, session, order):
        if self.beats:
            raise self.beats.pop()
        return True

    def run(self, order, run):
        self.runs += 1
        outcome = self.outcomes.pop(0) if self.outcomes else "done"
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome() if callable(outcome) else outcome

    def publish(self, session, order, result):
        self.published.append(order)
        return True

    def wait(self, session, subject, why):
        self.waited.append(why)

    def fail(self, session, subject, error):
        self.failed.append((error.code, error.detail))


@pytest.fixture
def attempts():
    return Attempts()


@pytest.fixture
def worker(home, attempts):
    new_worker = create_worker(home.settings, home.database)
    new_worker.handle(attempts)
    new_worker.register()
    return new_worker


@pytest.fixture
def request_task(home):
    def request_task(kind="attempt", subject="one"):
        with home.database.writing() as session:
            requests.request_task(session, kind, subject, "default")

    return request_task


@pytest.mark.parametrize(
    ("failure", "code", "detail"),
    [
        (ValueError("a bad byte"), "internal-error", "ValueError: a bad byte"),
        (KeyError("rank"), "internal-error", "KeyError: 'rank'"),
        (RecursionError("too deep"), "internal-error", "RecursionError: too deep"),
        (PermissionError(errno.EACCES, "denied"), "internal-error", "PermissionError: [Errno 13] denied"),
        (MobizoError("as the handler says"), "internal-error", "as the handler says"),
    ],
)
def test_whatever_a_handler_raises_fails_its_task(home, worker, attempts, request_task, failure, code, detail):
    attempts.outcomes = [failure]
    request_task()
    request_task(subject="two")
    drain(worker)
    assert attempts.failed == [(code, detail)]
    assert attempts.runs == 2
    assert attempts.published == ["two"]
    assert home.task("one") is home.task("two") is None


def test_what_begin_raises_fails_its_task(home, worker, attempts, request_task, monkeypatch):
    def begin(session, subject):
        raise ValueError("no such shape")

    monkeypatch.setattr(attempts, "begin", begin)
    request_task()
    drain(worker)
    assert attempts.failed == [("internal-error", "ValueError: no such shape")]


def test_a_full_disk_is_waited_for(home, worker, attempts, request_task):
    attempts.outcomes = [OSError(errno.ENOSPC, "No space left on device")] * 5
    request_task()
    for _ in range(5):
        drain(worker)
        assert (home.task("one").claim_id, home.task("one").attempts) == (None, 0)
    assert attempts.waited == ["waiting: The server's disk is full; nothing was stored, try again later."] * 5
    drain(worker)
    assert (attempts.published, attempts.failed) == (["one"], [])


def test_an_outage_ends_the_task_after_a_long_time(home, worker, attempts, request_task):
    attempts.outcomes = [Unavailable("the bucket does not answer")] * 2
    request_task()
    drain(worker)
    home.change(Task, unavailable_since=utc_now() - MAX_OUTAGE - timedelta(seconds=1))
    drain(worker)
    assert attempts.failed == [("unavailable", "the bucket does not answer")]


def test_an_exception_in_a_heartbeat_does_not_end_the_heartbeats(home, worker, attempts, request_task):
    attempts.beats = [ValueError("a bad stage")]

    def wait():
        eventually(lambda: not attempts.beats)
        return "done"

    attempts.outcomes = [wait]
    request_task()
    drain(worker)
    assert (attempts.published, attempts.runs) == (["one"], 1)


def test_a_stopping_worker_releases_its_task_once_the_database_is_free(home, attempts, request_task):
    worker = create_worker(home.settings, Database(home.settings.url, Tuning(lock_seconds=0.05)))
    worker.handle(attempts)
    worker.register()
    lock = sqlite3.connect(make_url(home.settings.url).database, isolation_level=None, check_same_thread=False)

    def stop():
        worker.stop()
        lock.execute("BEGIN IMMEDIATE")
        threading.Timer(1.0, lock.rollback).start()
        raise Stopped

    attempts.outcomes = [stop]
    request_task()
    drain(worker)
    assert (home.task("one").claim_id, home.task("one").attempts) == (None, 0)
    lock.close()


def test_a_task_of_a_kind_without_a_handler_ends(home, worker, attempts, request_task):
    with home.database.writing() as session:
        session.add(WorkerProcess(id="gone", pid=1, started_at=utc_now(), seen_at=utc_now() - timedelta(days=1)))
        session.flush()
        session.add(Task(kind="conversion-of-old", subject="lost", worker_id="gone", claim_id="claim", attempts=1))
    request_task(kind="conversion-of-old", subject="old")
    request_task()
    drain(worker)
    assert home.task("lost") is home.task("old") is None
    assert attempts.published == ["one"]


def failures(home):
    failures = home.scalars(select(SweepFailure))
    return [(failure.name, failure.subject, failure.failures, failure.error) for failure in failures]


def let_retry(home):
    home.change(SweepFailure, not_before=utc_now())


def test_a_sweep_that_raises_is_stored_and_backed_off(home, worker):
    calls = []

    def fails():
        calls.append(1)
        raise ValueError("no such file")

    worker.sweep("fails", "* * * * * *", fails)
    after = []
    worker.sweep("works", "* * * * * *", lambda: after.append(1))
    sweep(worker)
    sweep(worker)
    assert (len(calls), len(after)) == (1, 2)
    assert failures(home) == [("fails", "", 1, "ValueError: no such file")]
    let_retry(home)
    sweep(worker)
    failure = home.scalar(select(SweepFailure))
    assert failure.failures == 2
    assert failure.not_before - failure.failed_at == timedelta(seconds=10)
    worker.sweep("fails", "* * * * * *", lambda: None)
    let_retry(home)
    sweep(worker)
    assert failures(home) == []


def test_the_probe_and_the_operations_page_show_failing_sweeps(home, fleet, app, operator):
    assert app.get("/readyz").json() == {"status": "ok"}

    def fails():
        raise Unavailable("the bucket does not answer")

    run_guarded(home.database, "files", fails)
    response = app.get("/readyz")
    assert (response.status_code, response.json()) == (200, {"status": "degraded", "sweeps": "files"})


def test_a_cohort_that_fails_is_stored_and_tried_again(home, band, monkeypatch):  # noqa: F811
    def fails(*_):
        raise ValueError("a damaged tokenizer")

    band.begin("alice", "bob")
    band.past_deadline()
    number = home.scalar(select(Cohort.number))
    with monkeypatch.context() as patched:
        patched.setattr(RoundService, "end_if_due", fails)
        sweep(band.worker)
    assert failures(home) == [("rounds", f"cohort {number}", 1, "ValueError: a damaged tokenizer")]
    assert band.round()["state"] == "open"
    let_retry(home)
    sweep(band.worker)
    assert failures(home) == []
    assert band.round()["state"] == "abandoned"


def test_a_stray_file_among_the_objects_does_not_break_the_listing(home):
    sha256 = home.artifacts.put(b"kept")
    objects = home.settings.artifacts_path / "objects"
    (objects / "README").write_text("somebody's note")
    (objects / "lost+found").mkdir()
    (objects / sha256[:2] / "note.txt").write_text("another")
    (objects / sha256[:2] / "directory").mkdir()
    store = DiskArtifacts(home.settings.artifacts_path)
    assert [file.sha256 for file in store.listing() if file.sha256 == sha256] == [sha256]
    assert all(len(file.sha256) == 64 for file in store.listing())
