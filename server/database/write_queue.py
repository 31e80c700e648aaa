"""A queue in which requests wait, as asyncio tasks, before they start a writing transaction.

The thread pool is small, and one writing transaction needs several threads in sequence: for its dependency, its route
and its commit. If requests waited for the database lock inside threads, they could occupy all of them while the
transaction that holds the lock finds none to continue in. SQLite admits one writer, PostgreSQL fewer than there are
threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import ParamSpec, TypeVar

from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool

from server.database.database import Database

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Held = TypeVar("Held")
WRITERS = 16  # of the pool's 40 threads


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
