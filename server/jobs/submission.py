"""Submits jobs, for the API and the dashboard, after doing what must be done before the transaction begins.

Finding the noise of a private run and reading a calibration may take seconds. Inside the transaction they would block
all other writes.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import structlog
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CollectorRegistry, Counter
from sqlalchemy.orm import Session

from server.catalog.calibrations.service import calibration_of
from server.identity.tokens import Principal
from server.jobs.accounting import accounted
from server.jobs.repository import Job
from server.jobs.service import PREPARE_PRIVACY, JobService
from server.storage.store import Damaged
from server.web.state import AppState
from shared.access import Scope
from shared.errors import Forbidden
from shared.job import JobRequest, JobState

_log = structlog.get_logger()


async def prepare(connection: Request, tenant: str, request: JobRequest) -> None:
    """Prepares a submission, whose transaction finds the results in the caches. Raises as `accounted`."""
    state: AppState = connection.app.state.mobizo
    if request.recipe.calibration is not None:
        with suppress(Damaged):  # the transaction says what is wrong
            await run_in_threadpool(calibration_of, state.artifacts, request.recipe)
    if request.privacy is not None:
        await accounted(connection, tenant, partial(PREPARE_PRIVACY.get(), state.database, tenant, request))


def make_program_counter(registry: CollectorRegistry) -> Counter:
    """Makes the counter of submitted jobs, by whether their program was compiled before."""
    counter = Counter(
        "mobizo_program_requests",
        "Jobs submitted here, by whether their program was compiled already",
        ("cache",),
        registry=registry,
    )
    for cache in ("hit", "miss"):
        counter.labels(cache)
    return counter


def submit_job(principal: Principal, request: JobRequest, state: AppState, session: Session) -> Job:
    """Submits a job of a caller with the scope `jobs:write`, whose privacy was prepared, and counts it."""
    starts = "start" if request.start is not None else "repeat" if request.repeat is not None else None
    if starts is not None and Scope.ADAPTERS_READ not in principal.scopes:
        raise Forbidden(f"{starts}: the token lacks: adapters:read", missing=[Scope.ADAPTERS_READ])
    job = JobService(session, state.artifacts).submit(principal.tenant, request)
    state.meters.part(make_program_counter).labels("hit" if job.state is JobState.READY else "miss").inc()
    _log.info("job-submitted", job=job.id, recipe=job.recipe_id, state=job.state)
    return job
