"""A real server for tests: the application under uvicorn on a free port, over a database and files in a directory.

What a test says of the API holds on every database: tests of the slices run on SQLite and on PostgreSQL, all others on
SQLite, which is faster. A module says otherwise by `DATABASES`.
"""

import contextlib
import json
import logging
import shutil
import socket
import ssl
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import structlog
import uvicorn
from sqlalchemy import select, update
from tokenizers import Tokenizer, models, pre_tokenizers

from server.app import create_app
from server.catalog.bases import BaseModelEntry, BaseRepository
from server.catalog.calibrations.service import calibration_of
from server.clock import utc_now
from server.database.database import Database
from server.database.identifiers import new_id
from server.database.schema import upgrade
from server.identity.models import Role
from server.identity.repository import TenantRepository
from server.identity.service import TokenService
from server.identity.signing_keys import files as keys
from server.identity.tenants import TenantService
from server.jobs.events import make_event_feed
from server.jobs.leases.models import JobLease
from server.jobs.leases.service import LeaseService
from server.programs.compilation import CompileHandler
from server.settings import Settings
from server.storage.opening import open_artifacts
from server.tasks.models import Task, WorkerProcess
from server.tasks.queue import TaskQueue
from server.web.connections import ConnectionLimits, DeadlineProtocol, Listener
from server.web.state import AppState
from server.web.zero_copy import ZeroCopy
from server.wiring import wire
from shared.canonical import sha256_hex
from shared.request_signature import RequestSigner
from shared.signing import new_private_key, public_text
from shared.zo.lora import BaseShape, dump_adapter
from tests.postgres import Postgres, remember, restore
from tests.server import fake_compiler, fake_converter
from tests.server.s3 import s3

__all__ = ["s3"]  # a fixture

wire()
TESTS = Path(__file__).parent
BOTH = ("sqlite", "postgresql")
# Folders of tests that hold on both.
SLICES = {
    "catalog/calibrations",
    "catalog/runner_builds",
    "federation/privacy",
    "federation/secure_aggregation",
    "identity",
    "identity/devices",
    "identity/signing_keys",
    "jobs",
    "jobs/leases",
    "jobs/scheduling",
    "operations/health",
    "programs",
    "registry",
    "registry/adapter_grants",
    "registry/hub",
    "web",
}
ALWAYS_BOTH = {"database", "jobs/scheduling"}  # locking, and the queue of jobs
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
TLS = ssl.create_default_context()  # one for all clients: making it is most of what a client costs
WORDS = ("terrible", "great", "It", "was", "a", "film", "Yes", "No", "x", "very", "good", "bad")
JOB = {
    "base": "tiny",
    "user": "alice",
    "adapter": "alice-movies",
    "task": "sst2",
    "dataset": "movies",
    "recipe": {"rank": 2, "sequence_length": 16, "queries": 1, "effective_batch": 2, "estimator": "replay"},
    "training": {"steps": 3},
}


def job_request(**changes):
    """A valid body of POST /v1/jobs; `recipe` and `training` are merged into the defaults."""
    body = json.loads(json.dumps(JOB))
    for name in ("recipe", "training"):
        body[name] |= changes.pop(name, {})
    return body | changes


def result(**changes):
    """A valid Result."""
    return {
        "steps": 3,
        "best_step": 2,
        "train_seconds": 1.0,
        "seconds": 2.0,
        "peak_rss_bytes": 1000,
        "train_examples": 10,
        "truncated_examples": 0,
        "evaluations": [],
        "zero_shot_accuracy": 0.5,
        "tuned_accuracy": 0.75,
    } | changes


def adapter_bytes(size, value=0.5):
    """A valid adapter file of `size` elements."""
    return dump_adapter(np.full(size, value, np.float32), {"job": "test"})


def write_source(directory):
    """A base model that the fake compiler can read."""
    directory.mkdir()
    vocabulary = {word: number for number, word in enumerate(("[UNK]", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
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

    def token(self, role, tenant="default", name="", device_id=None):
        """The text of a token that never expires, of a tenant that is made if there is none."""
        with self.database.writing() as session:
            if TenantRepository(session).by_name(tenant) is None:
                TenantService(session).create(tenant)
            return TokenService(session).issue(role, tenant, name, device_id)[1]

    def behave(self, **behaviour):
        """How the fake compiler behaves from now on."""
        (self.source / "behaviour.json").write_text(json.dumps(behaviour))

    def starts(self):
        """Process ids of all compilers that were started."""
        log = self.source / "starts.log"
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    def convert_so(self, **behaviour):
        """How the fake converter behaves from now on."""
        (self.source / "converter.json").write_text(json.dumps(behaviour))

    def conversions(self):
        """Process ids of all converters that were started."""
        log = self.source / "conversions.log"
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    def compile(self):
        """Compiles what waits, in this process."""
        worker = Workers(self, new_id("worker"))
        name, handler = worker.names[0], CompileHandler(self.settings, self.artifacts)
        while (claim := worker.do(name, handler, "claim")) is not None:
            order = claim.order
            with self.artifacts.workspace("in-test") as workspace:
                source, calibration = Path(order.source), calibration_of(self.artifacts, order.recipe)
                manifest = fake_compiler.build(order.recipe, source, workspace / "program", calibration)
                for file in manifest.files:
                    self.artifacts.adopt(workspace / "program" / file.name, file.sha256)
            assert worker.do(name, handler, "complete", claim, manifest.model_copy(update={"version": order.version}))

    def task(self, subject):
        """The task of a program, conversion or round by its id."""
        with self.database.reading() as session:
            found = session.scalars(select(Task).where(Task.subject == subject)).one()
            session.expunge_all()
            return found

    def set_task(self, subject=None, **values):
        """Sets columns of a task, or of all."""
        statement = update(Task) if subject is None else update(Task).where(Task.subject == subject)
        with self.database.writing() as session:
            session.execute(statement.values(**values))

    def let_run_out(self, lease):
        """Puts a lease's end into the past."""
        with self.database.writing() as session:
            late = utc_now() - timedelta(seconds=1)
            session.execute(update(JobLease).where(JobLease.id == lease["id"]).values(expires_at=late))

    def take_back(self):
        """Notices, as a worker does, which leases have run out."""
        with self.database.writing() as session:
            LeaseService(session, self.settings.lease_seconds).take_back_overdue()

    def stored_files(self):
        """Names of all files in the store."""
        return sorted(path.name for path in (self.settings.artifacts_path / "objects").rglob("*") if path.is_file())


class Workers:
    """Workers of one home, each of whose calls is one transaction."""

    def __init__(self, home, *names, host=""):
        self.home, self.names = home, names
        now = utc_now()
        with home.database.writing() as session:
            for name in names:
                session.add(WorkerProcess(id=name, pid=1, host=host, started_at=now, seen_at=now))

    def do(self, name, handler, action, *arguments):
        with self.home.database.writing() as session:
            queue = TaskQueue(session, self.home.settings, name, {handler.kind: handler})
            found = getattr(queue, action)(*arguments)
            session.flush()
            session.expunge_all()
            return found


def pytest_generate_tests(metafunc):
    """Tests of the slices run on each database; on PostgreSQL, most of them are slow tests.

    `make test` runs on both what ALWAYS_BOTH holds, what is marked `both_databases`, and the first test of each module.
    """
    if "database_kind" in metafunc.fixturenames:
        module, folder = metafunc.module, Path(metafunc.definition.path).parent.relative_to(TESTS).as_posix()
        kinds = getattr(module, "DATABASES", BOTH if folder in SLICES else BOTH[:1])
        first = vars(module).setdefault("_first_with_a_database", metafunc.function) is metafunc.function
        if not (first or folder in ALWAYS_BOTH or metafunc.definition.get_closest_marker("both_databases")):
            kinds = [*kinds[:1], *(pytest.param(kind, marks=pytest.mark.slow) for kind in kinds[1:])]
        metafunc.parametrize("database_kind", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def database_kind(request):
    """The database under a test: `sqlite` or `postgresql`."""
    return request.param


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server for all tests of this process."""
    server = Postgres()
    yield server.start()
    server.remove()


def fill(settings, tokenizer):
    """Makes a database what `init` and the registration of one base model leave."""
    database = Database(settings.url, settings.tuning)
    upgrade(database.engine)
    with database.writing() as session:
        BaseRepository(session).add(
            BaseModelEntry(
                name="tiny",
                source="set by the copy",
                sha256="b" * 64,
                shape=SHAPE,
                parameters=1000,
                tokenizer_sha256=open_artifacts(settings).put(tokenizer),
                created_at=utc_now(),
            )
        )
    database.close()


@pytest.fixture(scope="session")
def home_template(tmp_path_factory):
    """A home that `init` made, with one base model, on SQLite; copied for each test."""
    root = tmp_path_factory.mktemp("template")
    settings = Settings(home=root / "home")
    settings.home.mkdir()
    keys.create_key(settings.key_path)
    write_source(root / "source")
    fill(settings, (root / "source" / "tokenizer.json").read_bytes())
    return root


@pytest.fixture(scope="session")
def postgres_template(postgres, home_template):
    """The same on PostgreSQL: a database that is made anew for each test; its URL."""
    url = postgres.create("home")
    tokenizer = (home_template / "source" / "tokenizer.json").read_bytes()
    fill(Settings(home=home_template / "home", database_url=url), tokenizer)
    with postgres.administrator("home") as link:
        remember(link)
    return url


@pytest.fixture
def database_url(request, database_kind):
    """Of a database as `home_template`'s; None: SQLite in the home."""
    if database_kind == "sqlite":
        return None
    url = request.getfixturevalue("postgres_template")
    with request.getfixturevalue("postgres").administrator("home") as link:
        restore(link)
    return url


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
        # Tests ask faster than anyone, and are refused more often; those of the limits set their own.
        token_rate=1e6,
        address_rate=1e6,
        refusal_rate=1e6,
        compile_lease_seconds=60,
        compile_backoff_seconds=0,
        compiler_command=[sys.executable, fake_compiler.__file__],
        converter_command=[sys.executable, fake_converter.__file__],
    )


@contextlib.contextmanager
def home_of(settings, source):
    """A home, whose base model lies in `source`."""
    found = Home(settings, source)
    with found.database.writing() as session:
        BaseRepository(session).by_name("tiny").source = str(source)
    yield found
    found.close()


@pytest.fixture
def home(home_template, database_url, tmp_path):
    root = tmp_path / "server"
    with home_of(copy_home(home_template, root, database_url), root / "source") as found:
        yield found


@pytest.fixture
def empty_url(request, database_kind, tmp_path):
    """Of an empty database."""
    if database_kind == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.sqlite3'}"
    return request.getfixturevalue("postgres").empty("empty")


@contextlib.contextmanager
def serving(app, limits=None, plain=None):
    """The application answering on a free port, or on the listening socket `plain`; yields its URL."""
    # Errors only, and without pytest's locals in their tracebacks.
    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
    )
    listening = Listener(plain or socket.create_server(("127.0.0.1", 0)), limits or ConnectionLimits.of(Settings()))
    config = uvicorn.Config(
        ZeroCopy(app), http=DeadlineProtocol, log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
        structlog.configure(**before)


def alive(pid):
    """Whether a process runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Actor(httpx.Client):
    """A client with one token."""

    def __init__(self, url, token=None):
        super().__init__(
            base_url=url, timeout=120, verify=TLS, headers={"Authorization": f"Bearer {token}"} if token else {}
        )
        self.device_id = None
        self.token = token
        self.signer = None  # of a device's key

    def send(self, request, **how):
        """Signs what a device sends, unless the test has signed it."""
        if self.signer is not None and request.method not in ("GET", "HEAD") and "signature" not in request.headers:
            path, _, query = request.url.raw_path.decode().partition("?")
            request.headers.update(self.signer.headers(request.method, path, query, request.read()))
        return super().send(request, **how)

    def submit(self, **changes):
        """A job, in the state in which it was answered."""
        response = self.post("/v1/jobs", json=job_request(**changes))
        assert response.status_code == 202, response.text
        return response.json()

    def lease(self, *datasets, **changes):
        """A lease, or None."""
        response = self.post("/v1/leases", json={"datasets": list(datasets or ("movies",)), **changes})
        assert response.status_code in (200, 204), response.text
        return response.json() if response.status_code == 200 else None

    def upload(self, lease, data=None):
        data = adapter_bytes(lease["manifest"]["manifest"]["size"]) if data is None else data
        return self.put(f"/v1/leases/{lease['id']}/adapter", content=data)

    def finish(self, lease, value=0.5, **changes):
        """Uploads and completes; the new version."""
        data = adapter_bytes(lease["manifest"]["manifest"]["size"], value)
        assert self.upload(lease, data).status_code == 200
        body = {"adapter_sha256": sha256_hex(data), "result": result(**changes)}
        response = self.post(f"/v1/leases/{lease['id']}/complete", json=body)
        assert response.status_code == 200, response.text
        return response.json()


class Fleet:
    """A running server and the actors that tests need."""

    def __init__(self, home, url):
        self.home, self.url = home, url
        self._actors = []

    def actor(self, token=None, signer=None):
        actor = Actor(self.url, token)
        actor.signer = signer
        self._actors.append(actor)
        return actor

    def app(self, tenant="default"):
        return self.actor(self.home.token(Role.APP, tenant))

    def operator(self, tenant="default"):
        return self.actor(self.home.token(Role.OPERATOR, tenant))

    def device(self, tenant="default", name="phone"):
        operator = self.operator(tenant)
        token = operator.post("/v1/enrollments", json={}).json()["token"]
        key = new_private_key()
        body = {"name": name, "public_key": public_text(key.public_key()), "platform": "linux"}
        response = self.actor(token).post("/v1/devices", json=body)
        assert response.status_code == 201, response.text
        grant = response.json()
        device = self.actor(grant["token"])
        device.device_id = grant["device_id"]
        device.signer = RequestSigner(key, time.time)
        return device

    def ready_job(self, app, **changes):
        """A job whose program is compiled."""
        job = app.submit(**changes)
        self.home.compile()
        return app.get(f"/v1/jobs/{job['id']}").json()

    def close(self):
        for actor in self._actors:
            actor.close()


@pytest.fixture(scope="session")
def standing(home_template):
    """One application for all tests, and its URL: building the routes is most of what a fresh one costs."""
    app = create_app(Settings(home=home_template / "home"))
    with serving(app) as url:
        yield app, url


@pytest.fixture
def fleet(home, standing):
    """The application, moved to this test's home."""
    app, url = standing
    key = keys.load_key(home.settings.key_path)
    app.state.mobizo = AppState(home.settings, home.database, home.artifacts, key.public_key(), utc_now())
    found = Fleet(home, url)
    yield found
    found.close()
    # A stream whose reader left looks into the database until the server notices.
    state, deadline = app.state.mobizo, time.monotonic() + 10
    while time.monotonic() < deadline and not (
        state.get(make_event_feed).idle and not state.meters.registry.get_sample_value("mobizo_event_streams_open")
    ):
        time.sleep(0.005)


@pytest.fixture
def app(fleet):
    return fleet.app()


@pytest.fixture
def operator(fleet):
    return fleet.operator()


@pytest.fixture
def device(fleet):
    return fleet.device()


@pytest.fixture
def lease(fleet, app, device):
    """A lease of `device` on a job of `app`."""
    fleet.ready_job(app)
    found = device.lease()
    assert found is not None
    return found


def assert_problem(response, status, code):
    """A problem document, whole."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["status"] == status
    assert document["code"] == code
    assert document["type"] == f"urn:mobizo:problem:{code}"
    assert document["title"]
    assert document["detail"]
    return document


@pytest.fixture
def problem():
    return assert_problem
