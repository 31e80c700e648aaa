"""The route that Prometheus asks."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.auth.guard import Operator
from server.http.place import Here

router = APIRouter(tags=["server"])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(here: Here, principal: Operator) -> Response:
    """Counts over the whole server in Prometheus's text format; none names a job, a device or a tenant."""
    return Response(here.exposition.text(), media_type=CONTENT_TYPE_LATEST)
