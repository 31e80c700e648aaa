"""The engine for several hosts: Procrastinate, a task queue in PostgreSQL that notifies workers at once.

One Procrastinate job is deferred for each waiting task, in the transaction that schedules the task; its queueing lock
is the task's name, so there is at most one. The job only wakes a worker: which task that worker runs is decided by our
own table, with its turns, priorities and memory limits. Every worker regularly compares Procrastinate's jobs with our
table, defers missing jobs, and removes those of dead workers.

Procrastinate's tables have their own schema in the same database, which our migrations do not change.
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

from server.settings import Settings
from server.tasks.engine import OUTAGES, WAIT_SECONDS
from server.tasks.repository import noted_scheduled

if TYPE_CHECKING:
    from server.tasks.engine import Worker

SCHEMA = "procrastinate"
QUEUE = "programs"
TASK = "compile"
AWAY = (*OUTAGES, ConnectorException, psycopg.OperationalError)
MOST_TASKS = 100  # missing jobs deferred at once; must exceed the number of workers
COMPARE_POLLS = 4  # Procrastinate's jobs are compared with the table once in this many polls
_LOCK = 0x6D6F62697A6F  # advisory lock of the database while the schema is created
_log = structlog.get_logger()


def prepare_schema(engine: Engine) -> None:
    """Creates Procrastinate's tables if they do not exist."""
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        if connection.scalar(text("SELECT to_regclass(:name)"), {"name": f"{SCHEMA}.procrastinate_jobs"}) is not None:
            return
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        connection.execute(text(f"SET LOCAL search_path TO {SCHEMA}"))
        # The driver directly, because the script has several statements and literal % signs.
        _driver(connection).execute(SchemaManager.get_schema())


def announce_scheduled(session: Session) -> None:
    """Defers a job for each task that the session's transaction scheduled; it is committed or rolled back with it."""
    names = noted_scheduled(session)
    if not names:
        return
    connection = session.connection()
    path = f"SELECT set_config('search_path', '{SCHEMA},' || current_setting('search_path'), true)"
    connection.execute(text(path))
    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector())
    for waiting_id in names:
        # A nested transaction, so that a failure does not roll back the outer one.
        with suppress(AlreadyEnqueued), connection.begin_nested():
            task = app.configure_task(TASK, queue=QUEUE, queueing_lock=waiting_id, connection=_driver(connection))
            task.defer(waiting_id=waiting_id)


class ProcrastinateEngine:
    """Runs tasks for one worker, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def run(self, worker: Worker) -> None:
        """Runs the worker until it is stopping, and retries while the database is unavailable."""
        # One long-lived thread starts all compilers, because a compiler is killed when the thread that started it ends.
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
            await self._compare(app, worker)  # tasks that did not fit beside this one may fit now

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
                tasks.cancel()  # a running task still completes
                with suppress(asyncio.CancelledError):
                    await tasks

    async def _supervise(self, app: procrastinate.App, worker: Worker, tasks: asyncio.Task[None]) -> None:
        """Runs until the worker is stopping, or Procrastinate's worker ends because the database is unavailable."""
        polls = 0
        while not worker.stopping.is_set() and not tasks.done():
            if polls % COMPARE_POLLS == 0:
                await asyncio.to_thread(worker.look_around)
                await self._compare(app, worker)
            polls += 1
            await asyncio.wait({tasks}, timeout=self._settings.poll_seconds)

    async def _compare(self, app: procrastinate.App, worker: Worker) -> None:
        """Defers missing jobs, and removes those of dead workers."""
        manager = app.job_manager
        seconds = self._settings.compile_lease_seconds
        for job in await manager.get_stalled_jobs(queue=QUEUE, seconds_since_heartbeat=seconds):
            await manager.finish_job(job, Status.FAILED, delete_job=True)
        startable = await asyncio.to_thread(worker.startable, MOST_TASKS)
        if not startable:
            return
        queued = {job.queueing_lock for job in await manager.list_jobs_async(queue=QUEUE, status=Status.TODO.value)}
        for waiting_id in startable:
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
