"""The route that Prometheus asks."""

from __future__ import annotations

from typing import Annotated

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.auth.guard import needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.http.place import Here
from server.http.routes import Routes

router = Routes(tags=["server"])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(principal: Annotated[Principal, needs(Scope.METRICS_READ)], here: Here) -> Response:
    """Counts over the whole server in Prometheus's text format; none names a job, a device or a tenant."""
    return Response(here.exposition.text(), media_type=CONTENT_TYPE_LATEST)
