"""The engine for many hosts: Procrastinate, a task queue in PostgreSQL that tells workers at once.

A task is deferred for each program or conversion that waits, in the transaction that asks for it; its queueing lock is
the recipe's or the conversion's id, so there is at most one. A task brings one worker to look: what that makes, the
tables of programs and conversions decide, with their turns, priorities and memory. Tasks are therefore never the truth:
every worker compares them with the tables now and then, defers those that lack, and clears away those of workers that
died.

Procrastinate's tables have a schema of their own in the same database, which no migration of ours touches.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import procrastinate
import psycopg
import structlog
from procrastinate.exceptions import AlreadyEnqueued, ConnectorException
from procrastinate.jobs import Status
from procrastinate.schema import SchemaManager
from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from server.programs.announcement import noted_wanted
from server.settings import Settings
from server.work.outage import OUTAGES, WAIT_SECONDS

if TYPE_CHECKING:
    from server.work.engine import Worker

SCHEMA = "procrastinate"
QUEUE = "programs"
TASK = "compile"
AWAY = (*OUTAGES, ConnectorException, psycopg.OperationalError)
MOST_TASKS = 100  # deferred at a time where they lack; more programs than workers is enough
COMPARE_POLLS = 4  # every so many polls tasks are compared with the table
_LOCK = 0x6D6F62697A6F  # of the database, while the schema is made
_log = structlog.get_logger()


def prepare_schema(engine: Engine) -> None:
    """Makes Procrastinate's tables if they are not there."""
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        if connection.scalar(text("SELECT to_regclass(:name)"), {"name": f"{SCHEMA}.procrastinate_jobs"}) is not None:
            return
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        connection.execute(text(f"SET LOCAL search_path TO {SCHEMA}"))
        # Not SQLAlchemy's way: many statements, whose % are no parameters.
        _driver(connection).execute(SchemaManager.get_schema())


def tell_wanted(session: Session) -> None:
    """Defers a task for each thing that the session's transaction asks for; committed or dropped with it."""
    wanted = noted_wanted(session)
    if not wanted:
        return
    connection = session.connection()
    path = f"SELECT set_config('search_path', '{SCHEMA},' || current_setting('search_path'), true)"
    connection.execute(text(path))
    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector())
    for waiting_id in wanted:
        # What fails must not take the transaction with it.
        with suppress(AlreadyEnqueued), connection.begin_nested():
            task = app.configure_task(TASK, queue=QUEUE, queueing_lock=waiting_id, connection=_driver(connection))
            task.defer(waiting_id=waiting_id)


class ProcrastinateEngine:
    """Runs tasks for one worker, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def run(self, worker: Worker) -> None:
        """Lets the worker work until it is stopping; a database that is away is waited for."""
        # One thread of its own for compiles: a compiler is killed when the thread that started it ends.
        with ThreadPoolExecutor(1, "compile") as thread:
            while not worker.stopping.is_set():
                try:
                    asyncio.run(self._run(worker, thread))
                except AWAY as error:
                    _log.warning("database-away", worker=worker.id, error=str(error))
                    worker.stopping.wait(WAIT_SECONDS)

    async def _run(self, worker: Worker, thread: ThreadPoolExecutor) -> None:
        app = procrastinate.App(connector=self._connector())
        seconds = self._settings.compile_lease_seconds

        @app.task(name=TASK, queue=QUEUE)
        async def work_on_next(**waiting: str) -> None:
            await asyncio.get_running_loop().run_in_executor(thread, worker.work)
            await self._compare(app, worker)  # what did not fit beside this one may fit now

        async with app.open_async():
            tasks = asyncio.create_task(
                app.run_worker_async(
                    queues=[QUEUE],
                    name=worker.id,
                    concurrency=1,
                    delete_jobs="always",
                    install_signal_handlers=False,
                    update_heartbeat_interval=seconds / 4,
                    stalled_worker_timeout=seconds,
                )
            )
            try:
                await self._supervise(app, worker, tasks)
            finally:
                tasks.cancel()  # it lets a task that runs come to its end
                with suppress(asyncio.CancelledError):
                    await tasks

    async def _supervise(self, app: procrastinate.App, worker: Worker, tasks: asyncio.Task[None]) -> None:
        """Until the worker is stopping, or what runs tasks has ended, as it does when the database goes away."""
        polls = 0
        while not worker.stopping.is_set() and not tasks.done():
            if polls % COMPARE_POLLS == 0:
                await asyncio.to_thread(worker.look_around)
                await self._compare(app, worker)
            polls += 1
            await asyncio.wait({tasks}, timeout=self._settings.poll_seconds)

    async def _compare(self, app: procrastinate.App, worker: Worker) -> None:
        """Defers the tasks that lack, and clears away those of workers that died."""
        manager = app.job_manager
        seconds = self._settings.compile_lease_seconds
        for job in await manager.get_stalled_jobs(queue=QUEUE, seconds_since_heartbeat=seconds):
            await manager.finish_job(job, Status.FAILED, delete_job=True)
        wanted = await asyncio.to_thread(worker.startable, MOST_TASKS)
        if not wanted:
            return
        queued = {job.queueing_lock for job in await manager.list_jobs_async(queue=QUEUE, status=Status.TODO.value)}
        for waiting_id in wanted:
            if waiting_id not in queued:
                with suppress(AlreadyEnqueued):
                    task = app.configure_task(TASK, queue=QUEUE, queueing_lock=waiting_id)
                    await task.defer_async(waiting_id=waiting_id)

    def _connector(self) -> procrastinate.PsycopgConnector:
        url = make_url(self._settings.url)
        options = f"{url.query.get('options', '')} -c search_path={SCHEMA}".strip()
        plain = url.set(drivername="postgresql").difference_update_query(["options"])
        return procrastinate.PsycopgConnector(
            conninfo=plain.render_as_string(hide_password=False),
            kwargs={"options": options},
            min_size=1,
            max_size=4,
        )


def _driver(connection: Connection) -> psycopg.Connection[tuple[object, ...]]:
    return cast("psycopg.Connection[tuple[object, ...]]", connection.connection.driver_connection)
