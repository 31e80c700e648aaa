"""What a request finds around it: settings, database, files and key; and its transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fastapi import Depends, Request
from sqlalchemy.orm import Session

from server.artifacts.store import ArtifactStore
from server.auth.limits import Limits
from server.auth.uses import Uses
from server.clock import utc_now
from server.closing import Closing
from server.db.database import Database
from server.db.grouping import GroupCommit
from server.db.turns import Turns
from server.devices.presence import Attendance, Presence, write_presences
from server.leases.repository import LeaseRepository
from server.leases.service import Beat, LeaseService
from server.metrics.exposition import Exposition
from server.metrics.meters import Meters
from server.queue.room import WaitingRoom
from server.scoring.scorer import Scorer
from server.settings import Settings
from shared.protocol import LeaseState


@dataclass(frozen=True)
class Place:
    """One running server's parts, made once by `server.app`."""

    settings: Settings
    database: Database
    artifacts: ArtifactStore
    public_key: Ed25519PublicKey
    started_at: datetime
    meters: Meters = field(default_factory=Meters)
    closing: Closing = field(default_factory=Closing)

    @cached_property
    def exposition(self) -> Exposition:
        """What it tells of all this."""
        return Exposition(self.meters, self.database)

    @cached_property
    def turns(self) -> Turns:
        """In which requests write."""
        return Turns(self.database)

    @cached_property
    def room(self) -> WaitingRoom:
        """Where devices wait for a job."""
        return WaitingRoom(self.database, self.closing, self.settings.look_seconds, self._take_back_overdue)

    def _take_back_overdue(self) -> None:
        with self.database.reading() as session:
            if not LeaseRepository(session).overdue(utc_now()):
                return
        with self.database.writing() as session:
            LeaseService(session, self.settings.lease_seconds, self.settings.lease_attempts).take_back_overdue()

    @cached_property
    def beats(self) -> GroupCommit[Beat, LeaseState]:
        """Heartbeats, of many devices in one transaction."""

        def write(session: Session, beats: Sequence[Beat]) -> list[LeaseState | Exception]:
            return LeaseService(session, self.settings.lease_seconds).heartbeats(beats)

        return GroupCommit(self.database, self.turns, write)

    @cached_property
    def attendance(self) -> Attendance:
        """When each device was noted last."""
        return Attendance()

    @cached_property
    def presences(self) -> GroupCommit[Presence, None]:
        """That devices are there, of many in one transaction."""
        return GroupCommit(self.database, self.turns, write_presences)

    async def present(self, presence: Presence) -> None:
        """Notes that a device is there, if that was not done just before."""
        if self.attendance.due(presence):
            await self.presences.add(presence)

    @cached_property
    def scorer(self) -> Scorer:
        """What scores and generates."""
        return Scorer(self.settings, self.meters.scorer)

    @cached_property
    def limits(self) -> Limits:
        """How many requests tokens and addresses have left."""
        return Limits(self.settings)

    @cached_property
    def uses(self) -> Uses:
        """When tokens were used, where it is not written yet."""
        return Uses()


# Not a thread's: it only looks.
async def _place(request: Request) -> Place:
    place: Place = request.app.state.place
    return place


Here = Annotated[Place, Depends(_place)]


def _reading(here: Here) -> Iterator[Session]:
    with here.database.reading() as session:
        yield session


async def _writing(here: Here) -> AsyncIterator[Session]:
    async with here.turns.holding(here.database.writing()) as session:
        yield session


# "function": the transaction ends before the response is sent, so that a client that was answered finds its write.
Reading = Annotated[Session, Depends(_reading, scope="function")]
Writing = Annotated[Session, Depends(_writing, scope="function")]
