"""A job's events as a stream. A waiting stream holds no transaction and no thread, and makes no query of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Header
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import ServerSentEvent

from server.database.columns import MAX_INTEGER
from server.database.database import DatabaseUnavailable
from server.identity.tokens import TokenService
from server.jobs.repository import JobEvent, JobRepository
from server.web.routes import STREAM_READERS
from server.web.state import AppState
from server.web.tenant_turns import current_tenant
from shared.errors import BadRequest, TooManyRequests

BATCH = 200
MAX_STREAMS = 100  # open streams of one token, in each server process


def _last_event_id(
    last_event_id: Annotated[
        str, Header(alias="Last-Event-ID", max_length=20, description="the last event that the client received")
    ] = "0",
) -> int:
    if not last_event_id.isascii() or not last_event_id.isdigit() or int(last_event_id) >= 2**63:
        raise BadRequest("Last-Event-ID was not issued by this server; begin without it")
    return int(last_event_id)


LastEventId = Annotated[int, Depends(_last_event_id)]


def _read(state: AppState, token_id: str, number: int, after: int) -> tuple[Sequence[JobEvent], bool]:
    """Returns the next events, and whether the stream ends: they are the job's last, or the token has expired."""
    with state.database.reading() as session:
        if not TokenService(session).alive(token_id):
            return [], True
        jobs = JobRepository(session)
        events = jobs.events_after(number, after, BATCH)
        job = jobs.by_number(number)
        last = events[-1].position if events else after
        return events, job.state.final and last >= job.events


@dataclass(eq=False)
class _Watcher:
    """One open stream: what it reads, how far it has read, and the event that wakes it."""

    token_id: str
    number: int
    after: int
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class EventFeed:
    """Looks for new events on behalf of all open streams, by one query at a time. Used in the event loop only."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._watchers: set[_Watcher] = set()
        self._streams: Counter[str] = Counter()  # by token: open ones, and those that are about to open
        self._looking: asyncio.Task[None] | None = None

    @contextmanager
    def reserved(self, token_id: str) -> Iterator[None]:
        """Counts a stream of a token until the end of the context. Raises TooManyRequests if it has MAX_STREAMS."""
        if self._streams[token_id] >= MAX_STREAMS:
            raise TooManyRequests(
                f"this token has {MAX_STREAMS} open event streams; close one first",
                limit="streams",
                retry_after_seconds=1,
            )
        self._streams[token_id] += 1
        try:
            yield
        finally:
            self._streams[token_id] -= 1
            if not self._streams[token_id]:
                del self._streams[token_id]

    @contextmanager
    def watching(self, token_id: str, number: int) -> Iterator[_Watcher]:
        """Wakes the watcher when its job has new events, its token ends, or the server stops."""
        watcher = _Watcher(token_id, number, MAX_INTEGER)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    async def wait(self, watcher: _Watcher, after: int) -> None:
        """Waits for events after a position, for the end of the token, or for the server to stop.

        May return without any of these.
        """
        watcher.after = after
        watcher.changed.clear()
        if self.idle:
            self._looking = asyncio.create_task(self._look_again_and_again())
        await watcher.changed.wait()
        watcher.after = MAX_INTEGER

    @property
    def idle(self) -> bool:
        """Whether no query of the feed runs or is planned."""
        return self._looking is None or self._looking.done()

    async def close(self) -> None:
        """Waits until the feed is idle. The server's shutdown must have begun, which ends all streams."""
        if self._looking is not None:
            await asyncio.wait([self._looking])

    async def _look_again_and_again(self) -> None:
        stopping = False
        try:
            while self._watchers and not stopping:
                stopping = await self._state.shutdown.pause(self._state.settings.poll_seconds)
                if not (watched := list(self._watchers)):
                    return
                try:
                    events, alive = await run_in_threadpool(_read_changes, self._state, watched)
                except DatabaseUnavailable:
                    continue  # the streams wait until the database is back
                for watcher in watched:
                    if watcher.token_id not in alive or events.get(watcher.number, 0) > watcher.after:
                        watcher.changed.set()
        finally:
            # No stream waits for a task that has ended: each reads for itself, and starts the task again.
            for watcher in self._watchers:
                watcher.changed.set()


def _read_changes(state: AppState, watched: list[_Watcher]) -> tuple[dict[int, int], set[str]]:
    """Returns how many events the watched jobs have, and which of the watchers' tokens are valid."""
    with state.database.reading() as session:
        events = JobRepository(session).event_counts({watcher.number for watcher in watched})
        tokens = TokenService(session)
        alive = {token_id for token_id in {watcher.token_id for watcher in watched} if tokens.alive(token_id)}
    return events, alive


async def job_events(state: AppState, token_id: str, number: int, after: int) -> AsyncIterator[ServerSentEvent]:
    """Yields the events of one job after a position, until the job has ended and all its events were sent.

    It ends sooner if the reader's token ends, or the server stops.
    """
    feed, readers = state.get(EventFeed), state.get(STREAM_READERS.make)
    with state.meters.streams.track_inprogress(), feed.watching(token_id, number) as watcher:
        while True:
            try:
                events, done = await readers.run(current_tenant.get(), _read, state, token_id, number, after)
            except DatabaseUnavailable:
                # The stream continues once the database is back.
                events, done = [], False
            for event in events:
                after = event.position
                yield ServerSentEvent(raw_data=event.data, event=event.kind, id=str(event.position))
            if done or state.shutdown.begun:
                return
            if not events:
                await feed.wait(watcher, after)
