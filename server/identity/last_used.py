"""Last-used times of tokens, collected in memory and written once a minute, so that requests do not wait for them."""

from __future__ import annotations

import asyncio
from datetime import datetime

import structlog
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError

from server.database.database import Database
from server.identity.repository import TokenRepository
from shared.errors import Unavailable

WRITE_SECONDS = 60.0
_log = structlog.get_logger()


class LastUsed:
    """Last-used times that are not written yet, by token number."""

    def __init__(self) -> None:
        self._moments: dict[int, datetime] = {}

    def note(self, token: int, moment: datetime) -> None:
        """Records that a token was used."""
        self._moments[token] = moment

    def write(self, database: Database) -> None:
        """Writes the recorded times; keeps them for the next attempt if the database is unavailable."""
        moments, self._moments = self._moments, {}
        if not moments:
            return
        try:
            with database.writing() as session:
                TokenRepository(session).used(moments)
        except (SQLAlchemyError, Unavailable) as error:
            self._moments = moments | self._moments
            _log.warning("token-uses-not-written", error=str(error).split("\n")[0])

    async def keep_writing(self, database: Database) -> None:
        """Writes once a minute until it is cancelled."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await run_in_threadpool(self.write, database)
