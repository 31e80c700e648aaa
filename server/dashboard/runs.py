"""The figures of runs as they arrive: one job's events for the charts, and several jobs side by side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, Query, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from server.dashboard.access import signed_in
from server.dashboard.pages import Visitor
from server.dashboard.routes import PageRoutes
from server.jobs.events import EventFeed, LastEventId, job_events
from server.jobs.repository import JobRepository
from server.registry.comparison import flattened
from server.web.state import Reading, State
from shared.access import Scope
from shared.errors import BadRequest
from shared.job import JobView

router = PageRoutes(prefix="/ui")
Reader = Annotated[Visitor, signed_in(Scope.JOBS_READ)]
MAX_RUNS = 4  # a browser opens six connections to a server, and each run takes one


async def _has_a_stream_left(visitor: Reader, state: State) -> AsyncIterator[None]:
    with state.get(EventFeed).reserved(visitor.principal.token_id):
        yield


def _position(
    visitor: Reader,
    job_id: str,
    last: LastEventId,
    allowed: Annotated[None, Depends(_has_a_stream_left)],
    session: Reading,
    after: Annotated[int, Query(ge=0, le=2**31 - 1, description="as Last-Event-ID, for a stream begun anew")] = 0,
) -> tuple[int, int]:
    """Returns the job's number and the position after which its events are sent."""
    job = JobRepository(session).get(visitor.principal.tenant, job_id)
    position = max(last, after)
    if position > job.events:
        raise BadRequest("Last-Event-ID is beyond this job's last event; begin without it")
    return job.number, position


@router.get("/jobs/{job_id}/events", response_class=EventSourceResponse)
async def events(
    visitor: Reader, begin: Annotated[tuple[int, int], Depends(_position)], state: State
) -> AsyncIterator[ServerSentEvent]:
    """Streams a job's events, as GET /v1/jobs/ID/events does."""
    async for event in job_events(state, visitor.principal.token_id, *begin):
        yield event


@router.get("/compare")
def compare(
    visitor: Reader,
    session: Reading,
    job: Annotated[list[str] | None, Query(max_length=50)] = None,
) -> Response:
    """Several runs side by side: their curves, results, and the settings in which they differ."""
    ids = list(dict.fromkeys(job or ()))[:MAX_RUNS]
    views = [JobRepository(session).get(visitor.principal.tenant, job_id).view() for job_id in ids]
    return visitor.page("compare.html", "Compare runs", jobs=views, settings=differences(views), most=MAX_RUNS)


def differences(views: list[JobView]) -> list[tuple[str, list[Any]]]:
    """Returns the settings whose values differ between jobs, with the value of each."""
    flat = [dict(flattened(view.request.model_dump(mode="json"))) for view in views]
    names = sorted({name for each in flat for name in each})
    rows = [(name, [each.get(name) for each in flat]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]
