"""Homes of servers for tests: a database and files in a directory, with one base model that the fake compiler reads."""

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
from dbos import DBOSClient
from sqlalchemy import create_engine, select, update
from tokenizers import Tokenizer, models, pre_tokenizers

from server.catalog.bases import BaseModelEntry, BaseRepository
from server.catalog.calibrations.service import calibration_of
from server.database import database
from server.database.columns import new_id, utc_now
from server.database.database import Database
from server.identity.devices.service import revoke_device
from server.identity.signing_keys import service as keys
from server.identity.tenants import TenantService
from server.identity.tokens import TokenService
from server.jobs.leases.repository import JobLease
from server.jobs.leases.service import take_back_overdue
from server.programs.compilation import CompileHandler
from server.schema import upgrade
from server.settings import Settings
from server.storage.garbage_collection import Collector
from server.storage.opening import open_artifacts
from server.tasks import queue
from server.tasks.queue import TaskQueue
from server.tasks.repository import Task, WorkerProcess
from server.tasks.requests import TASK
from server.wiring import wire
from shared.zo.lora import BaseShape
from tests.server import fake_compiler

queue.FIRST_BACKOFF = timedelta(0)
wire()
_first_engines = {}  # by the name of their dialect


def engine_with_known_statements(url, **options):
    """An engine that shares its dialect and its compiled SQL statements with the first one of this process.

    Each test has a database and an engine of its own, and compiling the statements anew for each would be a fifth of
    what the server's tests take.
    """
    engine = create_engine(url, **options)
    first = _first_engines.setdefault(engine.dialect.name, engine)
    if first.dialect.server_version_info is not None:  # the first one has been connected
        engine.dialect, engine._compiled_cache = first.dialect, first._compiled_cache
    return engine


database.create_engine = engine_with_known_statements
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
WORDS = ("terrible", "great", "It", "was", "a", "film", "Yes", "No", "x", "very", "good", "bad")


def word_tokenizer():
    """A tokenizer that has a token for each of WORDS."""
    vocabulary = {word: number for number, word in enumerate(("[UNK]", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def base_entry(name, tokenizer_sha256, **changes):
    """The row of a base model of SHAPE."""
    values = {"source": "x", "sha256": "b" * 64, "shape": SHAPE, "parameters": 1000, "created_at": utc_now()}
    return BaseModelEntry(name=name, tokenizer_sha256=tokenizer_sha256, **values | changes)


def write_source(directory):
    """A base model that the fake compiler can read."""
    directory.mkdir()
    word_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "shape.json").write_text(SHAPE.model_dump_json())


@dataclass
class Home:
    """A server's home on disk, and the shortcuts that tests take around HTTP."""

    settings: Settings
    source: Path

    def __post_init__(self):
        self.database = Database(self.settings.url, self.settings.tuning)
        self.artifacts = open_artifacts(self.settings)

    def close(self):
        self.database.close()

    def scalars(self, statement):
        """What a query finds."""
        with self.database.reading() as session:
            rows = session.scalars(statement).all()
            session.expunge_all()
            return rows

    def scalar(self, statement):
        """The only thing that a query finds."""
        (row,) = self.scalars(statement)
        return row

    def change(self, table, *conditions, **values):
        """Sets columns in the rows of a table for which the conditions hold."""
        with self.database.writing() as session:
            session.execute(update(table).where(*conditions).values(**values))

    def token(self, role, tenant="default", name="", device_id=None, scopes=None):
        """The text of a token that never expires, of a tenant that is made if there is none."""
        with self.database.writing() as session:
            if TenantService(session).find(tenant) is None:
                TenantService(session).create(tenant)
            return TokenService(session).issue(role, tenant, name, device_id, scopes=scopes)[1]

    def revoke_token(self, text):
        with self.database.writing() as session:
            tokens = TokenService(session)
            tokens.revoke(tokens.principal(text).token_id)

    def revoke_device(self, device_id):
        with self.database.writing() as session:
            revoke_device(session, "default", device_id)

    def behave(self, **behaviour):
        """How the fake compiler behaves from now on."""
        (self.source / "behaviour.json").write_text(json.dumps(behaviour))

    def starts(self):
        """Process ids of all compilers that were started."""
        log = self.source / "starts.log"
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    def compile(self):
        """Compiles what waits, in this process."""
        worker = Workers(self, new_id("worker"))
        name, handler = worker.names[0], CompileHandler(self.settings, self.artifacts)
        while (claim := worker.claim(name, handler)) is not None:
            order = claim.order
            with self.artifacts.workspace("in-test") as workspace:
                source, calibration = Path(order.source), calibration_of(self.artifacts, order.recipe)
                manifest = fake_compiler.build(order.recipe, source, workspace / "program", calibration)
                for file in manifest.files:
                    self.artifacts.adopt(workspace / "program" / file.name, file.sha256)
            assert worker.do(name, handler, "end", claim, manifest.model_copy(update={"version": order.version}))

    def task(self, subject):
        """The attempts at the task of a program or round; None if it waits for the first one, or has ended."""
        with self.database.reading() as session:
            task = session.scalars(select(Task).where(Task.subject == subject)).one_or_none()
            session.expunge_all()
            return task

    def let_run_out(self, lease):
        """Puts a lease's end into the past."""
        self.change(JobLease, JobLease.id == lease["id"], expires_at=utc_now() - timedelta(seconds=1))

    def take_back(self):
        """Notices, as a worker does, which leases have run out."""
        with self.database.writing() as session:
            take_back_overdue(session)

    def collect(self, **how):
        """A pass of the collector over files that are all old; the files that it removed."""
        before = set(self.stored_files())
        for sha256 in before:
            os.utime(self.artifacts._path(sha256), (0, 0))
        Collector(self.database, self.artifacts).collect(timedelta(hours=1), **how)
        return before - set(self.stored_files())

    def stored_files(self):
        """Names of all files in the store."""
        return sorted(path.name for path in (self.settings.artifacts_path / "objects").rglob("*") if path.is_file())


def waiting_tasks(database, *kinds, delayed=True):
    """Takes the tasks that wait, in the order in which DBOS begins them. delayed: those with a delay, too.

    Yields the arguments of each; a task that is enqueued again meanwhile is not among them.
    """
    client = DBOSClient(system_database_url=database.engine.url.render_as_string(hide_password=False))
    try:
        states = ["ENQUEUED", "DELAYED"] if delayed else ["ENQUEUED"]
        waiting = [
            task for task in client.list_workflows(status=states, name=TASK) if not kinds or task.queue_name in kinds
        ]
        for task in sorted(waiting, key=lambda task: (task.priority, task.created_at)):
            client.delete_workflows([task.workflow_id])
            yield tuple(task.input["args"])
    finally:
        client.destroy()


def sweep(worker):
    """Runs every sweep of a worker once, in this process."""
    worker.take_back()
    for name in worker.sweeps:
        worker.run_sweep(name)


def drain(worker):
    """Runs the sweeps of a worker and the tasks that wait in this process, as if the delays so far had passed."""
    worked = delayed = True
    while worked:
        sweep(worker)
        worked = False
        for task in waiting_tasks(worker._database, delayed=delayed):
            worked |= worker.run_task(*task)
        delayed = False


class Workers:
    """Workers of one home, each of whose calls is one transaction."""

    def __init__(self, home, *names, host=""):
        self.home, self.names = home, names
        now = utc_now()
        with home.database.writing() as session:
            for name in names:
                session.add(WorkerProcess(id=name, pid=1, host=host, started_at=now, seen_at=now))

    def claim(self, name, handler):
        """The claim of the first waiting task of this kind that can begin; None if there is none."""
        for task in waiting_tasks(self.home.database, handler.kind):
            if (claim := self.do(name, handler, "claim", *task)) is not None:
                return claim
        return None

    def lose(self, name, handler):
        """Takes the tasks of a worker back, as another one does that misses its heartbeats."""
        with self.home.database.reading() as session:
            others = set(session.scalars(select(WorkerProcess.id).where(WorkerProcess.id != name)))
        self.do(name, handler, "take_back", others)

    def do(self, name, handler, action, *arguments):
        with self.home.database.writing() as session:
            queue = TaskQueue(session, self.home.settings, name, {handler.kind: handler})
            outcome = getattr(queue, action)(*arguments)
            session.flush()
            session.expunge_all()
            return outcome


def fill(settings, tokenizer):
    """Makes a database what `init` and the registration of one base model leave."""
    database = Database(settings.url, settings.tuning)
    upgrade(database.engine)
    with database.writing() as session:
        # Its source is set by the copy.
        BaseRepository(session).add(base_entry("tiny", open_artifacts(settings).put(tokenizer), hub_id="acme/tiny"))
    database.close()


def make_home(root):
    """What `init` and the registration of one base model make, on SQLite; its base model's files are beside it."""
    settings = Settings(home=root / "home")
    settings.home.mkdir(parents=True)
    keys.create_key(settings.key_path)
    write_source(root / "source")
    fill(settings, (root / "source" / "tokenizer.json").read_bytes())


def copy_home(template, root, database_url):
    """The settings of a copy of a home in `root`; on another database: without SQLite's file."""
    shutil.copytree(template, root)
    if database_url is not None:
        for path in (root / "home").glob("mobizo.sqlite3*"):
            path.unlink()
    return Settings(
        home=root / "home",
        database_url=database_url,
        poll_seconds=0.05,
        # Tests ask faster than anyone; those of the limits set their own.
        token_rate=1e6,
        address_rate=1e6,
        compile_lease_seconds=60,
        compiler_command=[sys.executable, fake_compiler.__file__],
    )


@contextlib.contextmanager
def home_of(settings, source):
    """A home, whose base model lies in `source`."""
    home = Home(settings, source)
    home.change(BaseModelEntry, source=str(source))
    yield home
    home.close()


def alive(pid):
    """Whether a process runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(condition, seconds=60):
    """The condition's first true value, which must come in that time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return value


def at_once(*calls):
    """What each call returns, or raises first; all begin together, each in a thread."""
    gate = threading.Barrier(len(calls))

    def call(function):
        gate.wait()
        return function()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))
