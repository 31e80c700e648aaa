"""Whose turn it is to write, decided before a thread is taken. Knows no table.

Threads are few, and a writing transaction goes through several of them: its dependency's, its route's, and that of its
end. If whoever waits for the database's lock waited in a thread, all of them could be waiting for one that finds no
thread to go on in. So requests wait here, in order, as tasks: on SQLite for the one writer that it has, on PostgreSQL
for fewer than there are threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import ParamSpec, TypeVar

from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool

from server.db.database import Database

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Held = TypeVar("Held")
WRITERS = 16  # of the pool's 40 threads


class Turns:
    """Of one database, in one process; belongs to the thread that runs the event loop."""

    def __init__(self, database: Database) -> None:
        self._writers = asyncio.Semaphore(1 if database.engine.dialect.name == "sqlite" else WRITERS)

    @asynccontextmanager
    async def holding(self, context: AbstractContextManager[Held]) -> AsyncIterator[Held]:
        """Enters and leaves a writing context in threads, with a turn held from before to after."""
        async with self._writers, contextmanager_in_threadpool(context) as held:
            yield held

    async def run(
        self, write: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer:
        """Calls a function that writes, in a thread, when it is its turn."""
        async with self._writers:
            return await run_in_threadpool(write, *args, **kwargs)
