"""PostgreSQL as it is talked to: transactions, limits, and its errors in our words."""

import threading

import pytest
from sqlalchemy import text

from server.database.database import APPLICATION, Collision, Database, DatabaseUnavailable, Unstorable
from server.settings import Tuning
from shared.errors import BadRequest
from tests.server.homes import at_once


@pytest.fixture(scope="module")
def url(postgres):
    new_url = postgres.create("words")
    with postgres.administrator("words") as link:
        link.execute("CREATE TABLE words (number integer PRIMARY KEY, word varchar(8))")
        link.execute("INSERT INTO words VALUES (1, 'one'), (2, 'two')")
    return new_url


@pytest.fixture
def database(url):
    new_database = Database(
        url, Tuning(connections=2, overflow=1, connect_seconds=0.2, lock_seconds=0.2, statement_seconds=1)
    )
    yield new_database
    new_database.close()


def show(session, name):
    return session.scalar(text(f"SHOW {name}"))


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_every_way_to_write_its_url(url, scheme):
    database = Database(url.replace("postgresql+psycopg", scheme))
    with database.reading() as session:
        assert session.scalar(text("SELECT word FROM words WHERE number = 1")) == "one"
    database.close()


@pytest.mark.parametrize("url", ["mysql://x@h/d", "oracle://h", "nonsense", "", "postgresql+asyncpg://x@h/d"])
def test_other_databases_are_refused_by_name(url):
    with pytest.raises(BadRequest, match="MOBIZO_DATABASE_URL"):
        Database(url)


def test_it_is_told_who_asks_and_for_how_long_at_most(database):
    with database.reading() as session:
        assert show(session, "application_name") == APPLICATION
        assert show(session, "statement_timeout") == "1s"
        assert show(session, "lock_timeout") == "200ms"
        assert show(session, "idle_in_transaction_session_timeout") == "2s"


def test_a_reader_sees_one_moment_and_may_not_write(database):
    with database.reading() as session:
        count = text("SELECT count(*) FROM words")
        before = session.scalar(count)
        with database.writing() as other:
            other.execute(text("INSERT INTO words VALUES (3, 'three')"))
        assert session.scalar(count) == before
    with database.reading() as session:
        assert session.scalar(count) == before + 1
    with pytest.raises(DatabaseUnavailable), database.reading() as session:
        session.execute(text("DELETE FROM words"))


def test_writers_go_on_from_what_the_one_before_left(url):
    database = Database(url)
    with database.writing() as session:
        session.execute(text("UPDATE words SET word = '0' WHERE number = 2"))

    def count_up():
        for _ in range(20):
            with database.writing() as session:
                word = session.scalar(text("SELECT word FROM words WHERE number = 2 FOR UPDATE"))
                session.execute(text("UPDATE words SET word = :word WHERE number = 2"), {"word": str(int(word) + 1)})

    at_once(*[count_up] * 3)
    with database.reading() as session:
        assert session.scalar(text("SELECT word FROM words WHERE number = 2")) == "60"
    database.close()


def test_a_lock_that_is_not_given_is_waited_for_no_longer_than_set(database):
    with database.writing() as session:
        session.execute(text("UPDATE words SET word = word WHERE number = 1"))
        with pytest.raises(DatabaseUnavailable), database.writing() as other:
            other.execute(text("UPDATE words SET word = 'x' WHERE number = 1"))


def test_a_statement_that_takes_too_long_is_ended(database):
    with pytest.raises(DatabaseUnavailable), database.reading() as session:
        session.execute(text("SELECT pg_sleep(60)"))


def test_connections_that_are_all_in_use_are_waited_for_no_longer_than_set(database):
    with database.reading() as one, database.reading() as two, database.reading() as three:
        for session in (one, two, three):
            session.execute(text("SELECT 1"))
        with pytest.raises(DatabaseUnavailable), database.reading() as fourth:
            fourth.execute(text("SELECT 1"))


def test_the_same_key_twice_is_a_collision(database):
    with pytest.raises(Collision), database.writing() as session:
        session.execute(text("INSERT INTO words VALUES (1, 'again')"))


@pytest.mark.parametrize("word", ["a\0b", "longer than eight"])
def test_what_no_column_holds_is_the_requests_fault(database, word):
    with pytest.raises(Unstorable), database.writing() as session:
        session.execute(text("UPDATE words SET word = :word"), {"word": word})


def test_of_two_who_wait_for_each_other_one_is_a_collision(url):
    """Which the web layer does again: tests/server/web/test_retries.py."""
    database, gate = Database(url), threading.Barrier(2)

    def cross(*numbers):
        try:
            with database.writing() as session:
                for number in numbers:
                    session.execute(text(f"UPDATE words SET word = word WHERE number = {number}"))
                    if number == numbers[0]:
                        gate.wait()
        except Collision:
            return "collision"
        return "done"

    assert sorted(at_once(lambda: cross(1, 2), lambda: cross(2, 1))) == ["collision", "done"]
    database.close()


def none_left(link):
    """Whether, soon, the server has no connection."""
    count = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'words' AND application_name = 'mobizo-server'"
    for _ in range(1500):
        if link.execute(count).fetchone()[0] == 0:
            return True
        link.execute("SELECT pg_sleep(0.02)")
    return False


def test_a_connection_that_was_cut_is_replaced_unseen(database, postgres):
    with database.reading() as session:
        session.execute(text("SELECT 1"))
    with postgres.administrator() as link:
        link.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'words'")
        assert none_left(link)
    with database.reading() as session:
        assert session.scalar(text("SELECT 1")) == 1
