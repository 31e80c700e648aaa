"""The `Idempotency-Key` header as a FastAPI dependency.

An endpoint that creates something takes `once: Once` as its last parameter. Its route is a `server.web.routes.Route`,
which stores the response before the transaction commits. A rejected request had no effect and is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request, Response

from server.web.idempotency.models import IdempotencyRecord
from server.web.idempotency.service import IdempotencyService, KeyReused, SavedResponse, Sender
from server.web.openapi import may_raise
from server.web.state import State, Writing
from shared.canonical import sha256_hex
from shared.errors import InvalidRequest

REPLAYED = "Idempotency-Replayed"
_NOT_KEPT = ("content-length",)

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[!-~]{1,128}$",
        description="a unique value such as a UUID: the request can be retried and is executed once",
    ),
]


class AlreadyAnswered(Exception):
    """Carries the stored response out of the dependency; not an error."""

    def __init__(self, response: SavedResponse) -> None:
        self.response = Response(response.body, response.status, {**response.headers, REPLAYED: "true"})
        super().__init__()


@dataclass(frozen=True)
class ResponseRecorder:
    """Stores the response to the current request in its record."""

    record: IdempotencyRecord
    sender: Sender

    def keep(self, response: Response) -> None:
        """Stores the response in the request's transaction."""
        headers = {name: value for name, value in response.headers.items() if name not in _NOT_KEPT}
        IdempotencyService.keep(
            self.record, self.sender, SavedResponse(response.status_code, headers, bytes(response.body))
        )


async def _fingerprint(request: Request) -> str:
    head = f"{request.method} {request.url.path}?{request.url.query}\n"
    return sha256_hex(head.encode() + await request.body())


@may_raise(KeyReused, InvalidRequest)
def keep_once(
    request: Request,
    state: State,
    session: Writing,
    fingerprint: Annotated[str, Depends(_fingerprint)],
    key: Key = None,
) -> None:
    """Claims the key for this request. Raises AlreadyAnswered with the stored response, or KeyReused."""
    if key is None:
        return
    # The route's access rule ran first and found a valid header.
    sender = Sender(request.headers["authorization"].partition(" ")[2], key)
    record, response = IdempotencyService(session, state.settings.idempotency_seconds).begin(sender, fingerprint)
    if response is not None:
        raise AlreadyAnswered(response)
    request.state.response_recorder = ResponseRecorder(record, sender)


Once = Annotated[None, Depends(keep_once)]
