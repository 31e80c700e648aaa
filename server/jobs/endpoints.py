"""Routes of jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import structlog
from fastapi import Depends, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.jobs.events import EventFeed, LastEventId, job_events
from server.jobs.repository import JobRepository
from server.jobs.scheduling.explanation import ExplanationService
from server.jobs.service import JobService
from server.jobs.submission import prepare, submit_job
from server.web.idempotency import Once
from server.web.openapi import Responses, raises
from server.web.pages import Paging
from server.web.routes import Routes
from server.web.state import Reading, State, Writing
from shared.access import Scope
from shared.errors import (
    AdapterNotFound,
    BadRequest,
    BudgetExceeded,
    Conflict,
    DeviceNotBound,
    InvalidRecipe,
    InvalidTask,
    NotFound,
    QuotaExceeded,
    RevisionNotFound,
    StartMismatch,
    UnknownBase,
    VersionHeld,
)
from shared.job import NAME, JobRequest, JobState, JobSummary, JobView
from shared.protocol import JobWaiting, Page

router = Routes(prefix="/v1/jobs", tags=["jobs"])
_log = structlog.get_logger()
Reader = Annotated[Principal, needs(Scope.JOBS_READ)]
Writer = Annotated[Principal, needs(Scope.JOBS_WRITE)]
LOCATION: Responses = {
    202: {"headers": {"Location": {"description": "the job's address", "schema": {"type": "string"}}}}
}


async def _prepare(principal: Writer, request: JobRequest, connection: Request) -> None:
    await prepare(connection, principal.tenant, request)


@router.post(
    "",
    status_code=202,
    responses=LOCATION
    | raises(
        *(UnknownBase, InvalidTask, InvalidRecipe, NotFound, Conflict, DeviceNotBound),
        *(AdapterNotFound, RevisionNotFound, StartMismatch, VersionHeld, BudgetExceeded, QuotaExceeded),
    ),
)
def create_job(
    principal: Writer,
    request: JobRequest,
    response: Response,
    state: State,
    prepared: Annotated[None, Depends(_prepare)],
    session: Writing,
    once: Once,
) -> JobView:
    """Submits a job. Its state is at the Location, and its events at /events.

    With `start` the job continues from an adapter version of the tenant, and with `repeat` later jobs do, which also
    requires the scope `adapters:read`.
    """
    job = submit_job(principal, request, state, session)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job.view()


@router.get("")
def list_jobs(
    principal: Reader,
    session: Reading,
    paging: Paging,
    state: JobState | None = None,
    user: Annotated[str | None, Query(pattern=NAME)] = None,
    adapter: Annotated[str | None, Query(pattern=NAME)] = None,
) -> Page[JobSummary]:
    """Lists the tenant's jobs in short, newest first, optionally of one state, user or adapter."""
    rows = JobRepository(session).page(principal.tenant, paging, state, user, adapter)
    return paging.page([job.summary() for job in rows.rows], rows.before)


@router.get("/{job_id}")
def get_job(principal: Reader, job_id: str, session: Reading) -> JobView:
    """Shows one job."""
    return JobRepository(session).get(principal.tenant, job_id).view()


@router.get("/{job_id}/waiting")
def explain_waiting(principal: Reader, job_id: str, session: Reading) -> JobWaiting:
    """Explains why a job waits: for its program, for a suitable device, or for the jobs ahead of it."""
    return ExplanationService(session).explain(JobRepository(session).get(principal.tenant, job_id))


@router.post("/{job_id}/cancel", responses=raises(Conflict))
def cancel_job(principal: Writer, job_id: str, state: State, session: Writing) -> JobView:
    """Cancels a job in any state that is not final. Cancelling it again changes nothing.

    For a job that repeats, cancels the latest job of the series and ends the series, even between two jobs.
    """
    return JobService(session, state.artifacts).cancel(principal.tenant, job_id).view()


async def _has_a_stream_left(principal: Reader, state: State) -> AsyncIterator[None]:
    with state.get(EventFeed).reserved(principal.token_id):
        yield


def _number(
    principal: Reader,
    job_id: str,
    after: LastEventId,
    allowed: Annotated[None, Depends(_has_a_stream_left)],
    session: Reading,
) -> int:
    job = JobRepository(session).get(principal.tenant, job_id)
    if after > job.events:
        raise BadRequest("Last-Event-ID is beyond this job's last event; begin without it")
    return job.number


@router.get("/{job_id}/events", response_class=EventSourceResponse)
async def watch_job(
    principal: Reader, number: Annotated[int, Depends(_number)], after: LastEventId, state: State
) -> AsyncIterator[ServerSentEvent]:
    """Streams a job's events from its beginning, or after `Last-Event-ID`.

    `job` events carry the job's view, `progress` events its progress. The stream ends when the job ends or the token
    expires.
    """
    async for event in job_events(state, principal.token_id, number, after):
        yield event
