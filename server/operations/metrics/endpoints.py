"""The route that Prometheus scrapes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.operations.metrics.exposition import make_exposition
from server.web.routes import Routes
from server.web.state import State
from shared.access import Scope

router = Routes(tags=["server"])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def get_metrics(principal: Annotated[Principal, needs(Scope.METRICS_READ)], state: State) -> Response:
    """Returns metrics of the whole server in Prometheus's text format, without names of jobs, devices or tenants."""
    return Response(state.get(make_exposition).text(), media_type=CONTENT_TYPE_LATEST)
