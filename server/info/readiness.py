"""Whether a server can serve: its database, files, key and disk; and whether it is not about to stop. Knows no HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import structlog
from sqlalchemy.exc import SQLAlchemyError

from server.db.revisions import check_current
from server.http.place import Place
from server.keys import load_key
from shared.errors import MobizoError, Unavailable

_log = structlog.get_logger()


class NotReady(Unavailable):
    """The server cannot serve; its log says why."""

    code, title = "not-ready", "Not ready"


def check_disk(place: Place) -> None:
    """Raises Unavailable under the floor that the settings give."""
    free = shutil.disk_usage(place.settings.home).free
    if free < place.settings.disk_floor_bytes:
        raise Unavailable(f"{free} bytes are free; MOBIZO_DISK_FLOOR_BYTES asks for {place.settings.disk_floor_bytes}")


def _check_database(place: Place) -> None:
    with place.database.engine.connect() as connection:
        check_current(connection)


def _check_closing(place: Place) -> None:
    if place.closing.begun:
        raise Unavailable("the server stops")


CHECKS: dict[str, Callable[[Place], object]] = {
    "closing": _check_closing,
    "database": _check_database,
    "files": lambda place: place.artifacts.check_writable(),
    "key": lambda place: load_key(place.settings.key_path),
    "disk": check_disk,
}


def check_ready(place: Place) -> None:
    """Raises NotReady with the names of all that fails; why is for the log, since anyone may ask."""
    failing = []
    for name, check in CHECKS.items():
        try:
            check(place)
        except (MobizoError, SQLAlchemyError, OSError) as error:
            failing.append(name)
            _log.warning("not-ready", check=name, detail=str(error))
    if failing:
        raise NotReady(f"not ready: {', '.join(failing)}; the server's log says why", failing=failing)
