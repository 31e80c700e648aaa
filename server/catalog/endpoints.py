"""The route of base models, which are the same for every tenant."""

from __future__ import annotations

from typing import Annotated

from server.catalog.bases import BaseService
from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.web.routes import Routes
from server.web.state import Reading, State
from shared.access import Scope
from shared.catalog import BaseView

router = Routes(prefix="/v1/bases", tags=["bases"])


@router.get("")
def list_bases(
    principal: Annotated[Principal, needs(Scope.JOBS_READ)], session: Reading, state: State
) -> list[BaseView]:
    """Lists the base models that jobs may use, by name."""
    return BaseService(session, state.artifacts).views()
