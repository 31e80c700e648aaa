"""The route of the server's keys."""

from __future__ import annotations

from server.identity.access_rules import PUBLIC
from server.identity.signing_keys.service import KeyService
from server.web.routes import Routes
from server.web.state import Reading, State
from shared.key_rotation import ServerKeys

router = Routes(prefix="/v1/server", tags=["server"])


@router.get("/keys", dependencies=[PUBLIC])
def get_server_keys(state: State, session: Reading) -> ServerKeys:
    """The current signing key and the key rotation statements that lead to it. Requires no token."""
    return KeyService(session, state.settings).chain()
