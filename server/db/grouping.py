"""Group commit: many small writes of one kind that come at once share one transaction. Knows no table.

A commit waits for the disk, and on SQLite for every other writer, so what it costs hardly depends on how much it holds.
Whoever hands in a piece of work is answered after the commit that it is part of: nothing is told before it is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sqlalchemy.orm import Session

from server.db.database import Database
from server.db.failures import DatabaseUnavailable
from server.db.turns import Turns

Work = TypeVar("Work")
Answer = TypeVar("Answer")
MOST = 200  # pieces in one transaction


class GroupCommit(Generic[Work, Answer]):
    """Writes of one kind to one database; belongs to the thread that runs the event loop."""

    def __init__(
        self, database: Database, turns: Turns, write: Callable[[Session, Sequence[Work]], Sequence[Answer | Exception]]
    ) -> None:
        """write: does several pieces in a transaction, and answers each, or says what is wrong with that one alone."""
        self._database, self._turns, self._write = database, turns, write
        self._waiting: list[tuple[Work, asyncio.Future[Answer]]] = []
        self._task: asyncio.Task[None] | None = None

    async def add(self, work: Work) -> Answer:
        """Does a piece of work with others that wait. Raises what is wrong with it, or with the database."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, future))
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        # What comes while a transaction is under way is the next one's.
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                await self._commit(group)
        finally:
            self._task = None

    async def _commit(self, group: Sequence[tuple[Work, asyncio.Future[Answer]]]) -> None:
        answers: Sequence[Answer | Exception]
        try:
            answers = await self._turns.run(self._transact, [work for work, _ in group])
        except DatabaseUnavailable as error:
            answers = [error] * len(group)
        except Exception as error:
            if len(group) > 1:
                # One may have been in the way of all.
                for piece in group:
                    await self._commit([piece])
                return
            answers = [error]
        for (_, future), answer in zip(group, answers, strict=True):
            if future.done():
                continue  # its request was given up
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _transact(self, work: Sequence[Work]) -> Sequence[Answer | Exception]:
        with self._database.writing() as session:
            return self._write(session, work)
