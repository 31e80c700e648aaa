"""What a database refuses or fails at, as errors of ours. Knows no tables and no HTTP.

Database errors that are nobody's fault become `DatabaseUnavailable`, those of two transactions that met become
`Collision`, which is worth another try, and values that no column holds become `Unstorable`. Any other is a mistake of
ours and stays what it is.
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
# SQLSTATEs: serialization failure, deadlock, unique violation. SQLite's writers do not meet: theirs is none.
_COLLISIONS = {"40001", "40P01", "23505"}
# A standby that was asked to write, as while another server takes over.
_READ_ONLY = "25006"


class DatabaseUnavailable(Unavailable):
    """The database cannot serve this right now; nothing was changed; try again later."""


class Collision(Unavailable):
    """Somebody else changed the same things at the same moment, again and again; try again later."""


class Unstorable(BadRequest):
    """The request holds a character or a number that cannot be stored; leave it out."""


@contextmanager
def told() -> Iterator[None]:
    """Raises ours in place of the database's errors."""
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
    """How long to wait before another try, after so many; by chance, so that the same two do not meet again."""
    return random.uniform(0, _PAUSE_SECONDS * 2**tries)


def _ours(error: DBAPIError) -> DatabaseUnavailable | Collision | Unstorable | None:
    state = getattr(error.orig, "sqlstate", None)
    if state in _COLLISIONS:
        return Collision()
    if isinstance(error, OperationalError | InterfaceError) or error.connection_invalidated or state == _READ_ONLY:
        return DatabaseUnavailable()
    return Unstorable() if isinstance(error, DataError) else None
