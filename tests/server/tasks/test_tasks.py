"""Procrastinate's tasks beside our tables: deferred as jobs are submitted, once, and never in our migrations' way."""

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from server.schema import METADATA
from server.settings import Settings
from server.tasks.engine import engine_of, prepare_engine
from server.tasks.repository import note_scheduled
from shared.errors import BadRequest

DATABASES = ("postgresql",)


@pytest.fixture
def home(home):
    home.settings = home.settings.model_copy(update={"engine": "procrastinate"})
    prepare_engine(home.database, home.settings)
    with home.database.writing() as session:
        session.execute(text("TRUNCATE procrastinate.procrastinate_jobs CASCADE"))
    return home


@pytest.fixture
def tasks(home):
    def tasks():
        statement = "SELECT queueing_lock FROM procrastinate.procrastinate_jobs WHERE status = 'todo' ORDER BY id"
        with home.database.reading() as session:
            return list(session.scalars(text(statement)))

    return tasks


def test_a_program_that_is_asked_for_has_one_task(fleet, app, tasks):
    jobs = [app.submit(adapter=f"a{number}") for number in range(3)]
    other = app.submit(adapter="other", recipe={"rank": 3})
    assert tasks() == [f"compile:{jobs[0]['recipe_id']}", f"compile:{other['recipe_id']}"]


def test_a_merged_model_that_is_asked_for_has_one_task(fleet, app, device, tasks):
    fleet.ready_job(app)
    device.finish(device.lease())
    before = tasks()
    for _ in range(2):
        app.post("/v1/adapters/alice-movies/versions/1/merged")
    assert [task.partition(":")[0] for task in tasks()[len(before) :]] == ["conversion"]


class ChangedMind(Exception):
    """Why a transaction is dropped."""


def _ask(session):
    note_scheduled(session, "a" * 64)


def _ask_and_leave(session):
    _ask(session)
    session.flush()
    raise ChangedMind


def _ask_and_err(session):
    _ask(session)
    session.execute(text("SELECT no_such_column"))


def test_a_task_is_dropped_with_its_transaction(home, tasks):
    for function, error in ((_ask_and_leave, ChangedMind), (_ask_and_err, ProgrammingError)):
        with pytest.raises(error), home.database.writing() as session:
            function(session)
        assert tasks() == []
    with home.database.writing() as session:
        _ask(session)
    assert tasks() == ["a" * 64]


def test_our_migrations_do_not_see_it(home):
    prepare_engine(home.database, home.settings)  # once more changes nothing
    with home.database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        lines = [str(difference) for difference in compare_metadata(context, METADATA)]
    assert [line for line in lines if "procrastinate" in line] == []


def test_it_needs_postgresql(tmp_path):
    settings = Settings(home=tmp_path, engine="procrastinate")
    with pytest.raises(BadRequest, match="MOBIZO_DATABASE_URL"):
        engine_of(settings)
