"""Small writes that share a transaction, and turns that need no thread to wait in."""

import asyncio

import pytest
from sqlalchemy import text

from server.database.database import Database
from server.web.state import WriteQueue, group_commit, group_read
from shared.errors import Gone


@pytest.fixture
def database(tmp_path):
    new_database = Database(f"sqlite:///{tmp_path / 'x.sqlite3'}")
    with new_database.writing() as session:
        session.execute(text("CREATE TABLE notes (number INTEGER PRIMARY KEY)"))
    yield new_database
    new_database.close()


def stored(database):
    with database.reading() as session:
        return [number for (number,) in session.execute(text("SELECT number FROM notes ORDER BY number"))]


def test_one_that_breaks_the_transaction_does_not_take_the_others_with_it(database):
    def write(session, numbers):
        for number in numbers:
            session.execute(text("INSERT INTO notes VALUES (:number)"), {"number": number})
        return list(numbers)

    async def run():
        group = group_commit(WriteQueue(database), write)
        return await asyncio.gather(*(group.add(number) for number in (1, 2, 2, 3)), return_exceptions=True)

    answers = asyncio.run(run())
    assert [answers[0], answers[1], answers[3]] == [1, 2, 3]
    assert isinstance(answers[2], Exception)
    assert stored(database) == [1, 2, 3]


def test_more_writers_than_threads_do_not_wait_for_each_other_in_a_ring(database):
    """Each holds its transaction while it needs another thread, as requests do."""

    async def one(write_queue, number):
        async with write_queue.holding(database.writing()) as session:
            statement = text("INSERT INTO notes VALUES (:number)")
            await asyncio.to_thread(session.execute, statement, {"number": number})

    async def run():
        write_queue = WriteQueue(database)
        await asyncio.gather(*(one(write_queue, number) for number in range(100)))

    asyncio.run(run())
    assert stored(database) == list(range(100))


def test_a_grouped_read_begins_after_its_request_arrived(database):
    def read(session, numbers):
        present_numbers = set(session.scalars(text("SELECT number FROM notes")))
        return [number if number in present_numbers else Gone(str(number)) for number in numbers]

    async def run():
        group = group_read(database, read)
        before = await asyncio.gather(*(group.add(number) for number in range(5)), return_exceptions=True)
        earlier = asyncio.create_task(group.add(3))
        await asyncio.sleep(0)  # this read begins, and another request's write is committed
        with database.writing() as session:
            session.execute(text("INSERT INTO notes VALUES (4)"))
        after = await asyncio.gather(group.add(4), group.add(5), return_exceptions=True)
        await asyncio.gather(earlier, return_exceptions=True)
        return before, after

    before, after = asyncio.run(run())
    assert all(isinstance(answer, Gone) for answer in before)
    assert after[0] == 4
    assert isinstance(after[1], Gone)
