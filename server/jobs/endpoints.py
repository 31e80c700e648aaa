"""Routes of jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import structlog
from fastapi import Depends, Query, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from server.auth.guard import needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.http.etags import IfMatch
from server.http.idempotency import Once
from server.http.openapi import Responses, raises
from server.http.pages import Paging
from server.http.place import Here, Reading, Writing
from server.http.routes import Routes
from server.jobs.events import LastEventId, job_events
from server.jobs.repository import JobFilter, JobRepository
from server.jobs.service import JobService
from server.queue.explanation import ExplanationService
from shared.errors import (
    AdapterNotFound,
    BadRequest,
    BudgetExceeded,
    Conflict,
    Forbidden,
    InvalidRecipe,
    InvalidTask,
    NotFound,
    RevisionNotFound,
    StartMismatch,
    UnknownBase,
    VersionHeld,
)
from shared.job import NAME, JobRequest, JobState, JobView
from shared.protocol import JobWaiting, Page

router = Routes(prefix="/v1/jobs", tags=["jobs"])
_log = structlog.get_logger()
Reader = Annotated[Principal, needs(Scope.JOBS_READ)]
Writer = Annotated[Principal, needs(Scope.JOBS_WRITE)]
LOCATION: Responses = {
    202: {"headers": {"Location": {"description": "the job's address", "schema": {"type": "string"}}}}
}


@router.post(
    "",
    status_code=202,
    responses=LOCATION
    | raises(
        *(UnknownBase, InvalidTask, InvalidRecipe, NotFound, Conflict),
        *(AdapterNotFound, RevisionNotFound, StartMismatch, VersionHeld, BudgetExceeded),
    ),
)
def submit(
    principal: Writer, request: JobRequest, response: Response, here: Here, session: Writing, once: Once
) -> JobView:
    """Asks for a personalization; watch it at the Location, or at its /events.

    With `start` it goes on from an adapter version of the tenant's, which takes the scope `adapters:read` too.
    """
    if request.start is not None and Scope.ADAPTERS_READ not in principal.scopes:
        raise Forbidden("start: the token lacks: adapters:read", missing=[Scope.ADAPTERS_READ])
    job = JobService(session, here.artifacts).submit(principal.tenant, request)
    here.meters.program_asked(ready=job.state is JobState.READY)
    _log.info("job-submitted", job=job.id, recipe=job.recipe_id, state=job.state)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job.view()


@router.get("")
def jobs(
    principal: Reader,
    session: Reading,
    paging: Paging,
    state: JobState | None = None,
    user: Annotated[str | None, Query(pattern=NAME)] = None,
    adapter: Annotated[str | None, Query(pattern=NAME)] = None,
) -> Page[JobView]:
    """The tenant's jobs, newest first; of one state, user or adapter, where these are given."""
    found = JobRepository(session).page(principal.tenant, paging, JobFilter(state, user, adapter))
    return paging.page([job.view() for job in found.rows], found.before)


@router.get("/{job_id}")
def job(principal: Reader, job_id: str, here: Here, session: Reading) -> JobView:
    """One job as it stands."""
    return JobService(session, here.artifacts).get(principal.tenant, job_id).view()


@router.get("/{job_id}/waiting")
def waiting(principal: Reader, job_id: str, here: Here, session: Reading) -> JobWaiting:
    """Why a job does not go on: no device holds its data set, has its labels, enough memory, or it is not its turn."""
    return ExplanationService(session).explain(JobService(session, here.artifacts).get(principal.tenant, job_id))


@router.post("/{job_id}/cancel", responses=raises(Conflict))
def cancel(principal: Writer, job_id: str, here: Here, session: Writing, expected: IfMatch) -> JobView:
    """Stops a job wherever it is. Cancelling twice is fine."""
    jobs = JobService(session, here.artifacts)
    expected.check(jobs.get_locked(principal.tenant, job_id).view())
    return jobs.cancel(principal.tenant, job_id).view()


def _number(principal: Reader, job_id: str, after: LastEventId, here: Here, session: Reading) -> int:
    job = JobService(session, here.artifacts).get(principal.tenant, job_id)
    if after > job.events:
        raise BadRequest("Last-Event-ID is beyond this job's last event; begin without it")
    return job.number


@router.get("/{job_id}/events", response_class=EventSourceResponse)
async def events(
    principal: Reader, number: Annotated[int, Depends(_number)], after: LastEventId, here: Here
) -> AsyncIterator[ServerSentEvent]:
    """What happens to a job as it happens, from its beginning or after `Last-Event-ID`.

    `job` events carry the job's view, `progress` events its progress. The stream ends with the job, or the token.
    """
    async for event in job_events(here, principal.token_id, number, after):
        yield event
