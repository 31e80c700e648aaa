"""Writes of concurrent requests: the queue for writing transactions, and group commit.

Requests wait in the queue as asyncio tasks, because the thread pool is small and one writing transaction needs several
threads in sequence: for its dependency, its route and its commit. If requests waited for the database lock inside
threads, they could occupy all of them while the transaction that holds the lock finds none to continue in. SQLite
admits one writer, PostgreSQL fewer than there are threads.

With group commit, concurrent small writes of one kind share one transaction. A commit waits for the disk, and on SQLite
for every other writer, so its cost hardly depends on its size. Each caller gets its result only after the commit that
contains its write, so every result it sees is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Generic, ParamSpec, TypeVar

from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool
from sqlalchemy.orm import Session

from server.database.database import Database, DatabaseUnavailable

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Held = TypeVar("Held")
WRITERS = 16  # of the pool's 40 threads
Work = TypeVar("Work")
MOST_IN_GROUP = 200  # items in one transaction


class WriteQueue:
    """The write queue of one database in one process. Use it only in the thread of the event loop."""

    def __init__(self, database: Database) -> None:
        self._writers = asyncio.Semaphore(1 if database.engine.dialect.name == "sqlite" else WRITERS)

    @asynccontextmanager
    async def holding(self, context: AbstractContextManager[Held]) -> AsyncIterator[Held]:
        """Enters and leaves a writing context in threads, while holding a place among the writers."""
        async with self._writers, contextmanager_in_threadpool(context) as held:
            yield held

    async def run(
        self, write: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer:
        """Calls a writing function in a thread once a writer's place is free."""
        async with self._writers:
            return await run_in_threadpool(write, *args, **kwargs)


class GroupCommit(Generic[Work, Answer]):
    """Groups writes of one kind. Use it only in the thread of the event loop."""

    def __init__(
        self,
        database: Database,
        write_queue: WriteQueue,
        write: Callable[[Session, Sequence[Work]], Sequence[Answer | Exception]],
    ) -> None:
        """write: applies several items in a transaction and returns a result, or an exception, for each."""
        self._database, self._write_queue, self._write = database, write_queue, write
        self._waiting: list[tuple[Work, asyncio.Future[Answer]]] = []
        self._task: asyncio.Task[None] | None = None

    async def add(self, work: Work) -> Answer:
        """Applies an item together with others that wait. Raises the error of this item, or of the database."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, future))
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        # Items that arrive while a transaction runs belong to the next one.
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:MOST_IN_GROUP], self._waiting[MOST_IN_GROUP:]
                await self._commit(group)
        finally:
            self._task = None

    async def _commit(self, group: Sequence[tuple[Work, asyncio.Future[Answer]]]) -> None:
        answers: Sequence[Answer | Exception]
        try:
            answers = await self._write_queue.run(self._transact, [work for work, _ in group])
        except DatabaseUnavailable as error:
            answers = [error] * len(group)
        except Exception as error:
            if len(group) > 1:
                # One item may have made the whole group fail.
                for piece in group:
                    await self._commit([piece])
                return
            answers = [error]
        for (_, future), answer in zip(group, answers, strict=True):
            if future.done():
                continue  # its request was cancelled
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _transact(self, work: Sequence[Work]) -> Sequence[Answer | Exception]:
        with self._database.writing() as session:
            return self._write(session, work)
