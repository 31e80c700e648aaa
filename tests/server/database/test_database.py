"""Transactions on SQLite, and the column types."""

import contextlib
import sqlite3
import threading
from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from server.database.database import Database, DatabaseUnavailable, Tuning
from server.identity.tokens import Token
from server.schema import upgrade
from tests.server.homes import at_once


@pytest.fixture
def database(tmp_path):
    new_database = Database(f"sqlite:///{tmp_path / 'x.sqlite3'}")
    upgrade(new_database.engine)
    yield new_database
    new_database.close()


def token(number, **changes):
    values = {"id": f"t{number}", "digest": str(number), "role": "app", "tenant": "default", "name": ""}
    return Token(**(values | {"created_at": datetime.now(UTC)} | changes))


def test_durable_and_strict(database):
    with database.reading() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(text("PRAGMA foreign_keys")) == 1
        assert session.scalar(text("PRAGMA synchronous")) == 2


@pytest.mark.parametrize("patience", [30, 0])
def test_a_new_file_that_another_process_sets_up_just_now(tmp_path, patience):
    path = tmp_path / "new.sqlite3"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    other.execute("CREATE TABLE theirs (x)")
    timer = threading.Timer(0.3, other.execute, ("COMMIT",))
    if patience:
        timer.start()
    database = Database(f"sqlite:///{path}", Tuning(lock_seconds=patience))
    try:
        with (
            contextlib.nullcontext() if patience else pytest.raises(DatabaseUnavailable),
            database.reading() as session,
        ):
            assert session.scalar(text("SELECT count(*) FROM theirs")) == 0
            assert session.scalar(text("PRAGMA journal_mode")) == "wal"
    finally:
        timer.cancel()
        database.close()
        other.close()


def test_an_error_drops_the_whole_transaction(database):
    with pytest.raises(IntegrityError), database.writing() as session:
        session.add_all([token(1), token(2, digest="1")])
    with database.reading() as session:
        assert session.query(Token).count() == 0


def test_reading_writes_nothing(database):
    with database.reading() as session:
        session.add(token(1))
        session.flush()
    with database.reading() as session:
        assert session.query(Token).count() == 0


def test_writers_wait_for_each_other(database):
    with database.writing() as session:
        session.add(token(0, name="0"))

    def count_up():
        for _ in range(25):
            with database.writing() as session:
                row = session.query(Token).one()
                row.name = str(int(row.name) + 1)

    at_once(*[count_up] * 4)
    with database.reading() as session:
        assert session.query(Token).one().name == "100"


def test_times_come_back_aware_and_equal(database):
    moment = datetime(2026, 11, 21, 12, 0, 0, 123456, tzinfo=timezone(timedelta(hours=5)))
    with database.writing() as session:
        session.add(token(1, created_at=moment))
    with database.reading() as session:
        row = session.query(Token).one()
        assert row.created_at == moment
        assert row.created_at.tzinfo is UTC
        assert row.revoked_at is None
