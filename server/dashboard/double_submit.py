"""A form that is sent twice has its effect once; the second answer is the first one's.

Without JavaScript nothing stops a second click or a reload. The CSRF token in a form's hidden field is new on every
page, so it serves as the idempotency key: a form with the same token, address and fields is the same submission. The
record is stored in the transaction of the effect.

once: Once    the last parameter of a page that is posted to and writes with `session: Writing`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response
from sqlalchemy.orm import Session

from server.dashboard.access import Fields
from server.dashboard.sessions import Visitor
from server.web.idempotency import AlreadyAnswered, IdempotencyService, ResponseRecorder, SavedResponse, Sender
from server.web.idempotency_record import IdempotencyRecord
from server.web.state import State, Writing
from shared.canonical import sha256_hex


@dataclass(frozen=True)
class Submission:
    """One form of one page of one session."""

    sender: Sender

    def begin(self, session: Session) -> IdempotencyRecord:
        """Returns this submission's record. Raises AlreadyAnswered if the form was sent before."""
        record, before = IdempotencyService(session).begin(self.sender, sha256_hex(self.sender.key.encode()))
        if before is not None:
            raise AlreadyAnswered(before)
        return record

    def keep(self, record: IdempotencyRecord, response: Response) -> None:
        """Stores the response in its record."""
        headers = {"location": response.headers["location"]}
        IdempotencyService.keep(record, self.sender, SavedResponse(response.status_code, headers, b""))


async def submission(request: Request, form: Fields) -> Submission:
    """Returns the submission of a request whose form was checked."""
    visitor: Visitor = request.state.visitor
    body = await request.body()  # with the CSRF token
    return Submission(Sender(visitor.secret, sha256_hex(request.url.path.encode() + b"\n" + body)))


Submitted = Annotated[Submission, Depends(submission)]


def _once(request: Request, submitted: Submitted, state: State, session: Writing) -> None:
    record = submitted.begin(session)
    request.state.response_recorder = ResponseRecorder(record, submitted.sender)


Once = Annotated[None, Depends(_once)]
