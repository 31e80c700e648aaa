"""The application state that every request shares, and the request's transaction, as FastAPI dependencies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fastapi import Depends, Request
from sqlalchemy.orm import Session

from server.database.database import Database
from server.database.write_queue import WriteQueue
from server.settings import Settings
from server.storage.store import ArtifactStore
from server.web.limits import Limits
from server.web.middleware import Meters

Service = TypeVar("Service")


class Shutdown:
    """A one-way flag. Use it only in the thread of the event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether the server is stopping."""
        return self._event.is_set()

    def begin(self) -> None:
        """Ends every `pause` now."""
        self._event.set()

    async def pause(self, seconds: float) -> bool:
        """Waits for `seconds` or until the server stops. Returns whether it is stopping."""
        if not self.begun:
            try:
                async with asyncio.timeout(seconds):
                    await self._event.wait()
            except TimeoutError:
                pass
        return self.begun


@dataclass(frozen=True)
class AppState:
    """The shared parts of one running server, created once by `server.app`.

    Features have services besides: `state.get(make)`, where `make` is a function of the feature.
    """

    settings: Settings
    database: Database
    artifacts: ArtifactStore
    public_key: Ed25519PublicKey
    started_at: datetime
    meters: Meters = field(default_factory=Meters)
    shutdown: Shutdown = field(default_factory=Shutdown)
    _services: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False, compare=False)

    def get(self, make: Callable[[AppState], Service]) -> Service:
        """Returns the service that `make` makes; it is made once, when it is first asked for."""
        with self._lock:
            if make not in self._services:
                self._services[make] = make(self)
            service: Service = self._services[make]
            return service

    @cached_property
    def write_queue(self) -> WriteQueue:
        """The queue of writing transactions."""
        return WriteQueue(self.database)

    @cached_property
    def limits(self) -> Limits:
        """Rate limits by token and address."""
        return Limits(self.settings)


# async, so that FastAPI does not call it in a thread.
async def _state(request: Request) -> AppState:
    state: AppState = request.app.state.mobizo
    return state


State = Annotated[AppState, Depends(_state)]


def _reading(state: State) -> Iterator[Session]:
    with state.database.reading() as session:
        yield session


async def _writing(state: State) -> AsyncIterator[Session]:
    async with state.write_queue.holding(state.database.writing()) as session:
        yield session


# "function": the transaction ends before the response is sent, so that a client that has it finds its write.
Reading = Annotated[Session, Depends(_reading, scope="function")]
Writing = Annotated[Session, Depends(_writing, scope="function")]
