"""Readiness of a server: its database, files, key and disk are usable, and it is not shutting down."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import structlog
from sqlalchemy.exc import SQLAlchemyError

from server.database.schema import check_current
from server.identity.signing_keys.service import load_key
from server.settings import MEBIBYTE
from server.web.state import AppState
from shared.errors import MobizoError, Unavailable

DISK_FLOOR_BYTES = 512 * MEBIBYTE  # free disk space below which the server is not ready
_log = structlog.get_logger()


class NotReady(Unavailable):
    """The server is not ready; its log has the reason."""

    code, title = "not-ready", "Not ready"


def check_disk(state: AppState) -> None:
    """Raises Unavailable if less than the configured minimum of disk space is free."""
    free = shutil.disk_usage(state.settings.home).free
    if free < DISK_FLOOR_BYTES:
        raise Unavailable(f"{free} bytes are free; at least {DISK_FLOOR_BYTES} are required")


def _check_database(state: AppState) -> None:
    with state.database.engine.connect() as connection:
        check_current(connection)


def _check_shutdown(state: AppState) -> None:
    if state.shutdown.begun:
        raise Unavailable("the server is shutting down")


CHECKS: dict[str, Callable[[AppState], object]] = {
    "shutdown": _check_shutdown,
    "database": _check_database,
    "files": lambda state: state.artifacts.check_writable(),
    "key": lambda state: load_key(state.settings.key_path),
    "disk": check_disk,
}


def readiness(state: AppState) -> dict[str, str | None]:
    """Runs every check. Returns why each fails, None for one that succeeds; reasons also go to the log."""
    problems: dict[str, str | None] = {}
    for name, check in CHECKS.items():
        problems[name] = None
        try:
            check(state)
        except (MobizoError, SQLAlchemyError, OSError) as error:
            problems[name] = str(error)
            _log.warning("not-ready", check=name, detail=str(error))
    return problems


def check_ready(state: AppState) -> None:
    """Raises NotReady with the names of the failed checks. Reasons go to the log, because the probe is public."""
    failing = [name for name, detail in readiness(state).items() if detail is not None]
    if failing:
        raise NotReady(f"not ready: {', '.join(failing)}; the server's log has the reasons", failing=failing)
