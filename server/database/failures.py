"""Translation of database errors into the application's errors.

Outages become `DatabaseUnavailable`, conflicts between concurrent transactions become `Collision` (retryable), and
values that no column can hold become `Unstorable`. Any other database error is a bug and is raised unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DataError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from shared.errors import BadRequest, Unavailable

TRIES = 6
_PAUSE_SECONDS = 0.02
# SQLSTATEs: serialization failure, deadlock, unique violation. SQLite has one writer at a time, so it has none.
_COLLISIONS = {"40001", "40P01", "23505"}
# A write to a standby, as during a failover.
_READ_ONLY = "25006"


class DatabaseUnavailable(Unavailable):
    """The database is temporarily unavailable. Nothing was changed; try again later."""


class Collision(Unavailable):
    """Concurrent requests kept changing the same data. Nothing was changed; try again later."""


class Unstorable(BadRequest):
    """The request contains a character or a number that cannot be stored; remove it."""


@contextmanager
def translate_errors() -> Iterator[None]:
    """Context manager that replaces database errors with the application's own."""
    try:
        yield
    except PoolTimeout as error:
        raise DatabaseUnavailable from error
    except DBAPIError as error:
        ours = _ours(error)
        if ours is None:
            raise
        raise ours from error


def pause_seconds(tries: int) -> float:
    """Returns a random delay before the next attempt, so that the same two transactions do not collide again."""
    return random.uniform(0, _PAUSE_SECONDS * 2**tries)


def _ours(error: DBAPIError) -> DatabaseUnavailable | Collision | Unstorable | None:
    state = getattr(error.orig, "sqlstate", None)
    if state in _COLLISIONS:
        return Collision()
    if isinstance(error, OperationalError | InterfaceError) or error.connection_invalidated or state == _READ_ONLY:
        return DatabaseUnavailable()
    return Unstorable() if isinstance(error, DataError) else None
