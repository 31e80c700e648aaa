"""The route of the server's keys."""

from __future__ import annotations

from server.auth.guard import PUBLIC
from server.http.place import Here, Reading
from server.http.routes import Routes
from server.succession.service import KeyService
from shared.succession import ServerKeys

router = Routes(prefix="/v1/server", tags=["server"])


@router.get("/keys", dependencies=[PUBLIC])
def keys(here: Here, session: Reading) -> ServerKeys:
    """The key that signs manifests now, and the statements by which those before handed over. Needs no token."""
    return KeyService(session, here.settings).chain()
