"""Server information, keys, memory usage, liveness and readiness: what each means, and their routes."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from datetime import datetime
from typing import Annotated

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from server.database.schema import check_current
from server.identity.access_rules import PROBE, PUBLIC, needs
from server.identity.signing_keys.service import KeyService, load_key, server_info
from server.identity.tokens import Principal
from server.settings import MEBIBYTE
from server.tasks.repository import TaskRepository
from server.tasks.sweeps import failing_sweeps
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import AppState, Reading, State
from shared.access import Scope
from shared.errors import MobizoError, Unavailable
from shared.key_rotation import ServerKeys
from shared.protocol import ServerInfo, ServerUsage

KIBIBYTE = 1024
DISK_FLOOR_BYTES = 512 * MEBIBYTE  # free disk space below which the server is not ready
_log = structlog.get_logger()
router = Routes(tags=["server"])


class NotReady(Unavailable):
    """The server is not ready; its log has the reason."""


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


def server_usage(session: Session, since: datetime) -> ServerUsage:
    """Returns the peak memory of the server's processes, including workers with a heartbeat after `since`."""
    _, worker, compiler = TaskRepository(session).peaks(since)
    server = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE  # Linux reports kibibytes
    return ServerUsage(
        peak_rss_bytes=max(server, worker, compiler),
        server_peak_rss_bytes=server,
        worker_peak_rss_bytes=worker,
        compiler_peak_rss_bytes=compiler,
    )


@router.get("/v1/server", dependencies=[PUBLIC])
def get_server(state: State, session: Reading) -> ServerInfo:
    """Returns the version and the signing key. Requires no token."""
    return server_info(KeyService(session, state.settings).public())


@router.get("/v1/server/usage")
def get_usage(principal: Annotated[Principal, needs(Scope.SERVER_READ)], state: State, session: Reading) -> ServerUsage:
    """Returns the peak memory of the server, its workers and its compilers since the server started."""
    return server_usage(session, state.started_at)


@router.get("/healthz", dependencies=[PROBE])
async def check_liveness() -> dict[str, str]:
    """Liveness probe: succeeds if the process responds."""
    return {"status": "ok"}


@router.get("/readyz", dependencies=[PROBE], responses=raises(NotReady))
def check_readiness(state: State) -> dict[str, str]:
    """Readiness probe of database, files, key and disk. Returns 503 with the failed checks, and during shutdown.

    `sweeps` names the periodic sweeps of workers that fail; the server can still serve requests.
    """
    failing = [name for name, detail in readiness(state).items() if detail is not None]
    if failing:  # reasons go to the log, because the probe is public
        raise NotReady(f"not ready: {', '.join(failing)}; the server's log has the reasons", failing=failing)
    with state.database.reading() as session:
        names = sorted({failure.name for failure in failing_sweeps(session)})
    return {"status": "degraded", "sweeps": ", ".join(names)} if names else {"status": "ok"}


@router.get("/v1/server/keys", dependencies=[PUBLIC])
def get_server_keys(state: State, session: Reading) -> ServerKeys:
    """The current signing key and the key rotation statements that lead to it. Requires no token."""
    return KeyService(session, state.settings).chain()
