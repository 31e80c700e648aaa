"""Computes what a job's submission needs before its transaction begins: a FastAPI dependency.

Finding the noise of a private run takes seconds. Inside the transaction they would block all other writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import anyio
import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Depends

from server.database.database import Database
from server.identity.access_rules import needs
from server.identity.models import Scope
from server.identity.service import Principal
from server.jobs.lifecycle import PREPARATIONS
from server.web.state import AppState, State
from shared.errors import Unavailable
from shared.job import JobRequest

AT_ONCE = 2  # preparations that run at the same time
MOST_SECONDS = 60
Writer = Annotated[Principal, needs(Scope.JOBS_WRITE)]


def _make_limiter(state: AppState) -> CapacityLimiter:
    return CapacityLimiter(AT_ONCE)


async def run_preparation(state: AppState, work: Callable[[], None]) -> None:
    """Runs `work` in a thread of its own kind. Raises what it raises, or Unavailable if it takes too long."""
    try:
        with anyio.fail_after(MOST_SECONDS):
            await anyio.to_thread.run_sync(work, limiter=state.get(_make_limiter), abandon_on_cancel=True)
    except TimeoutError as error:
        raise Unavailable("privacy accounting takes too long at the moment; try again later") from error


async def _prepare(principal: Writer, request: JobRequest, state: State) -> None:
    if request.privacy is not None:
        await run_preparation(state, lambda: _run_all(state.database, principal.tenant, request))


def _run_all(database: Database, tenant: str, request: JobRequest) -> None:
    for prepare in PREPARATIONS.get():
        prepare(database, tenant, request)


Prepared = Annotated[None, Depends(_prepare)]
