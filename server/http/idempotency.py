"""`Idempotency-Key`: a request that was answered and is sent again gets the same answer, and nothing is done again.

An endpoint that makes something takes `once: Once` as its last parameter; its route is a `server.http.routes.Route`,
which hands the answer over before the transaction ends. A request that was refused had no effect and is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request, Response

from server.answers.models import KeptAnswer
from server.answers.service import Answer, AnswerService, KeyReused, Sender
from server.http.openapi import may_raise
from server.http.place import Here, Writing
from shared.canonical import sha256_hex
from shared.errors import InvalidRequest

REPLAYED = "Idempotency-Replayed"
_NOT_KEPT = ("content-length",)

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[!-~]{1,128}$",
        description="any new text, such as a UUID: with it, a request may be sent again and is done once",
    ),
]


class AnsweredBefore(Exception):
    """The request was answered before: no error, but the way out of a dependency."""

    def __init__(self, answer: Answer) -> None:
        self.response = Response(answer.body, answer.status, {**answer.headers, REPLAYED: "true"})
        super().__init__()


@dataclass(frozen=True)
class Keeper:
    """Where the answer to the request under way belongs."""

    place: KeptAnswer
    sender: Sender

    def keep(self, response: Response) -> None:
        """Keeps a response, in the transaction of what it tells."""
        headers = {name: value for name, value in response.headers.items() if name not in _NOT_KEPT}
        AnswerService.keep(self.place, self.sender, Answer(response.status_code, headers, bytes(response.body)))


async def _fingerprint(request: Request) -> str:
    head = f"{request.method} {request.url.path}?{request.url.query}\n"
    return sha256_hex(head.encode() + await request.body())


@may_raise(KeyReused, InvalidRequest)
def keep_once(
    request: Request,
    here: Here,
    session: Writing,
    fingerprint: Annotated[str, Depends(_fingerprint)],
    key: Key = None,
) -> None:
    """Claims the key for this request. Raises AnsweredBefore with the answer that it got before, or KeyReused."""
    if key is None:
        return
    # The route's rule, which comes first, let it in.
    sender = Sender(request.headers["authorization"].partition(" ")[2], key)
    place, answer = AnswerService(session, here.settings.idempotency_seconds).begin(sender, fingerprint)
    if answer is not None:
        raise AnsweredBefore(answer)
    request.state.keeper = Keeper(place, sender)


Once = Annotated[None, Depends(keep_once)]
