"""Computes what the submission of a private job needs before its transaction begins.

Finding the noise of a private run takes seconds. Inside the transaction they would block all other writes.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread
from anyio import CapacityLimiter

from server.jobs.service import PREPARATIONS
from server.web.state import AppState
from shared.errors import Unavailable
from shared.job import JobRequest

AT_ONCE = 2  # preparations that run at the same time
MOST_SECONDS = 60


def _make_limiter(state: AppState) -> CapacityLimiter:
    return CapacityLimiter(AT_ONCE)


async def run_preparation(state: AppState, work: Callable[[], None]) -> None:
    """Runs `work` in a thread of its own kind. Raises what it raises, or Unavailable if it takes too long."""
    try:
        with anyio.fail_after(MOST_SECONDS):
            await anyio.to_thread.run_sync(work, limiter=state.get(_make_limiter), abandon_on_cancel=True)
    except TimeoutError as error:
        raise Unavailable("privacy accounting takes too long at the moment; try again later") from error


async def prepare(state: AppState, tenant: str, request: JobRequest) -> None:
    """Runs every preparation of a submission. Raises as `run_preparation`."""

    def run_all() -> None:
        for prepare_one in PREPARATIONS.get():
            prepare_one(state.database, tenant, request)

    await run_preparation(state, run_all)
