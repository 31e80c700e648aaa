"""A job's events as a stream. Looks into the database again and again; holds no transaction and no thread meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated

from fastapi import Depends, Header
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import ServerSentEvent

from server.auth.repository import TokenRepository
from server.clock import utc_now
from server.db.failures import DatabaseUnavailable
from server.http.place import Place
from server.jobs.models import JobEvent
from server.jobs.repository import JobRepository
from shared.errors import BadRequest

BATCH = 200


def _last_event_id(
    last_event_id: Annotated[
        str, Header(alias="Last-Event-ID", max_length=20, description="the last event that was seen")
    ] = "0",
) -> int:
    if not last_event_id.isascii() or not last_event_id.isdigit() or int(last_event_id) >= 2**63:
        raise BadRequest("Last-Event-ID is not one that this server gave; begin without it")
    return int(last_event_id)


LastEventId = Annotated[int, Depends(_last_event_id)]


def _read(place: Place, token_id: str, number: int, after: int) -> tuple[Sequence[JobEvent], bool]:
    """The next events, and whether the stream ends: these are the job's last, or the token has ended."""
    with place.database.reading() as session:
        if not TokenRepository(session).alive(token_id, utc_now()):
            return [], True
        jobs = JobRepository(session)
        events = jobs.events_after(number, after, BATCH)
        job = jobs.by_number(number)
        last = events[-1].position if events else after
        session.expunge_all()
        return events, job.state.final and last >= job.events


async def job_events(place: Place, token_id: str, number: int, after: int) -> AsyncIterator[ServerSentEvent]:
    """Events of one job after a position, until it has ended and all were told.

    Sooner if the reader's token ends, or the server stops.
    """
    with place.meters.streams.track_inprogress():
        while True:
            try:
                events, done = await run_in_threadpool(_read, place, token_id, number, after)
            except DatabaseUnavailable:
                # Whoever watches may as well wait until it is back.
                events, done = [], False
            for event in events:
                after = event.position
                yield ServerSentEvent(raw_data=event.data, event=event.kind, id=str(event.position))
            if done or place.closing.begun:
                return
            if not events and await place.closing.pause(place.settings.poll_seconds):
                return
