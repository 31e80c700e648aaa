"""When tokens were last used: gathered in memory, written now and then, so that no request waits for it."""

from __future__ import annotations

import asyncio
from datetime import datetime

import structlog
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError

from server.auth.repository import TokenRepository
from server.db.database import Database
from shared.errors import Unavailable

WRITE_SECONDS = 60.0
_log = structlog.get_logger()


class Uses:
    """The uses that are not written yet: the latest of each token, by the token's number."""

    def __init__(self) -> None:
        self._moments: dict[int, datetime] = {}

    def note(self, token: int, moment: datetime) -> None:
        """A token was used."""
        self._moments[token] = moment

    def write(self, database: Database) -> None:
        """Writes what was noted; keeps it for the next time if the database cannot take it now."""
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
