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


@asynccontextmanager
async def worker_fleet(settings: Settings, count: int) -> AsyncIterator[None]:
    """`count` workers while the context lasts."""
    tasks = [asyncio.create_task(_keep_running(settings)) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
