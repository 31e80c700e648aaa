"""The server's own worker processes: started, restarted when they die, stopped with the server.

Knows neither what a worker does nor HTTP.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog

from server.settings import Settings
from server.tether import tethered

RESTART_SECONDS = 1.0
STOP_SECONDS = 10.0
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
    """One worker, and another each time it dies, until cancelled."""
    environment = os.environ | settings.environment()
    command = tethered([sys.executable, "-m", "server.worker"])
    while True:
        # A session of its own: Ctrl-C in a terminal reaches the server, which stops its workers in order.
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = await process.wait()
            _log.error("worker-died", exit_code=code)
            await asyncio.sleep(RESTART_SECONDS)
        finally:
            await _stop(process)


class WorkerFleet:
    """Workers that run until they are stopped."""

    def __init__(self, settings: Settings, count: int) -> None:
        self._tasks = [asyncio.create_task(_keep_running(settings)) for _ in range(count)]
        self._stopping = False

    def stop(self) -> None:
        """Asks every worker to give its work back and end; `gone` waits for that. Once: asking twice is fine."""
        # A second cancellation would end the wait for a worker that is just giving back.
        if not self._stopping:
            self._stopping = True
            for task in self._tasks:
                task.cancel()

    async def gone(self) -> None:
        """Returns when no worker is left."""
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def worker_fleet(settings: Settings, count: int) -> AsyncIterator[WorkerFleet]:
    """`count` workers while the context lasts, or until they are stopped in it."""
    fleet = WorkerFleet(settings, count)
    try:
        yield fleet
    finally:
        fleet.stop()
        await fleet.gone()
