"""Routes of jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from server.auth.guard import needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.http.pages import Paging, write_cursor
from server.http.place import Here, Reading, Writing
from server.jobs.events import LastEventId, job_events
from server.jobs.repository import JobRepository
from server.jobs.service import JobService
from shared.job import JobRequest, JobState, JobView
from shared.protocol import Page

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
_log = structlog.get_logger()
Reader = Annotated[Principal, needs(Scope.JOBS_READ)]
Writer = Annotated[Principal, needs(Scope.JOBS_WRITE)]


@router.post("", status_code=202)
def submit(principal: Writer, request: JobRequest, response: Response, here: Here, session: Writing) -> JobView:
    """Asks for a personalization; watch it at the Location, or at its /events."""
    job = JobService(session, here.artifacts).submit(principal.tenant, request)
    here.meters.program_asked(ready=job.state is JobState.READY)
    _log.info("job-submitted", job=job.id, recipe=job.recipe_id, state=job.state)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job.view()


@router.get("")
def jobs(principal: Reader, session: Reading, paging: Paging) -> Page[JobView]:
    """The tenant's jobs, newest first."""
    found = JobRepository(session).page(principal.tenant, paging)
    return Page(items=[job.view() for job in found.rows], next=write_cursor(found.before))


@router.get("/{job_id}")
def job(principal: Reader, job_id: str, here: Here, session: Reading) -> JobView:
    """One job as it stands."""
    return JobService(session, here.artifacts).get(principal.tenant, job_id).view()


@router.post("/{job_id}/cancel")
def cancel(principal: Writer, job_id: str, here: Here, session: Writing) -> JobView:
    """Stops a job wherever it is. Cancelling twice is fine."""
    return JobService(session, here.artifacts).cancel(principal.tenant, job_id).view()


def _number(principal: Reader, job_id: str, here: Here, session: Reading) -> int:
    return JobService(session, here.artifacts).get(principal.tenant, job_id).number


@router.get("/{job_id}/events", response_class=EventSourceResponse)
async def events(
    number: Annotated[int, Depends(_number)], after: LastEventId, here: Here
) -> AsyncIterator[ServerSentEvent]:
    """What happens to a job as it happens, from its beginning or after `Last-Event-ID`; ends with the job.

    `job` events carry the job's view, `progress` events its progress.
    """
    async for event in job_events(here, number, after):
        yield event
