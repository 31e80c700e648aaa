"""Who the server is, how much it uses, and whether it is well."""

from __future__ import annotations

from typing import Annotated

from server.auth.guard import PROBE, PUBLIC, needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.http.openapi import raises
from server.http.place import Here, Reading
from server.http.routes import Routes
from server.info.readiness import NotReady, check_ready
from server.info.service import server_info, server_usage
from server.succession.service import KeyService
from shared.protocol import ServerInfo, ServerUsage

router = Routes(tags=["server"])


@router.get("/v1/server", dependencies=[PUBLIC])
def info(here: Here, session: Reading) -> ServerInfo:
    """Version and signing key. Needs no token."""
    return server_info(KeyService(session, here.settings).public())


@router.get("/v1/server/usage")
def usage(principal: Annotated[Principal, needs(Scope.SERVER_READ)], here: Here, session: Reading) -> ServerUsage:
    """Peak memory of the server, its workers and its compilers since it started."""
    return server_usage(session, here.started_at)


@router.get("/healthz", dependencies=[PROBE])
async def alive() -> dict[str, str]:
    """Whether the process answers."""
    return {"status": "ok"}


@router.get("/readyz", dependencies=[PROBE], responses=raises(NotReady))
def ready(here: Here) -> dict[str, str]:
    """Whether database, files, key and disk can serve; 503 with the names of those that cannot, and while it stops."""
    check_ready(here)
    return {"status": "ok"}
