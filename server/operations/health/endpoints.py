"""The routes for server information, resource usage, liveness and readiness."""

from __future__ import annotations

from typing import Annotated

from server.identity.access_rules import PROBE, PUBLIC, needs
from server.identity.signing_keys.service import KeyService, server_info
from server.identity.tokens import Principal
from server.operations.health.readiness import NotReady, check_ready
from server.operations.health.service import server_usage
from server.tasks.sweeps import failing_sweeps
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import Reading, State
from shared.access import Scope
from shared.protocol import ServerInfo, ServerUsage

router = Routes(tags=["server"])


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
    check_ready(state)
    with state.database.reading() as session:
        names = sorted({failure.name for failure in failing_sweeps(session)})
    return {"status": "degraded", "sweeps": ", ".join(names)} if names else {"status": "ok"}
