"""The worker processes of the server: started with it, restarted when they die, and stopped with it."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from server.settings import Settings
from server.tasks.child_process import bound_to_parent
from server.tasks.worker import DRAIN_SECONDS

RESTART_SECONDS = 1.0
STOP_SECONDS = DRAIN_SECONDS + 10.0  # a worker that drains for the longest time still ends by itself
_log = structlog.get_logger()


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _keep_running(settings: Settings) -> None:
    """Runs a worker and restarts it whenever it dies, until cancelled."""
    environment = os.environ | settings.environment()
    command = bound_to_parent([sys.executable, "-m", "server.worker"])
    while True:
        # A separate session, so that Ctrl-C in a terminal reaches only the server, which then stops its workers.
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = await process.wait()
            _log.error("worker-died", exit_code=code)
            await asyncio.sleep(RESTART_SECONDS)
        finally:
            await _stop(process)


@asynccontextmanager
async def worker_fleet(settings: Settings, count: int) -> AsyncIterator[Callable[[], None]]:
    """Runs `count` workers until the context ends, or until the function that it yields is called; then waits for them.

    A worker that is stopped releases its tasks before it exits.
    """
    running = [asyncio.create_task(_keep_running(settings)) for _ in range(count)]
    not_stopped = list(running)

    def stop() -> None:
        # Once each: a second cancellation would end the wait for a worker that is releasing its task.
        while not_stopped:
            not_stopped.pop().cancel()

    try:
        yield stop
    finally:
        stop()
        await asyncio.gather(*running, return_exceptions=True)
