"""Group commit: concurrent small writes of one kind share one transaction.

A commit waits for the disk, and on SQLite for every other writer, so its cost hardly depends on its size. Each
caller gets its result only after the commit that contains its write, so every result it sees is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sqlalchemy.orm import Session

from server.database.database import Database
from server.database.failures import DatabaseUnavailable
from server.database.write_queue import WriteQueue

Work = TypeVar("Work")
Answer = TypeVar("Answer")
MOST = 200  # pieces in one transaction


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
                group, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
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
