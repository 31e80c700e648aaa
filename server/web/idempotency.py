"""Idempotency keys: a request that is retried with the same key gets the stored response of its first execution.

An endpoint that creates something takes `once: Once` as its last parameter. Its route is a `server.web.routes.Route`,
which stores the response in the transaction of its effect, before that commits. A rejected request had no effect and is
not stored.

A response may contain a token that is shown once, so it is encrypted with a key derived from the request's bearer token
and Idempotency-Key. The database holds only digests of both and therefore cannot decrypt a response.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from fastapi import Depends, Header, Request, Response
from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.web.idempotency_record import IdempotencyRecord
from server.web.openapi import may_raise
from server.web.state import State, Writing
from shared.canonical import sha256_hex
from shared.errors import BadRequest, InvalidRequest

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
NONCE_BYTES = 12
EXPIRED_PER_REQUEST = 20  # more than one request adds, so that expired records cannot accumulate


class IdempotencyRepository:
    """Idempotency records in one writing session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def claim(self, record: IdempotencyRecord, now: datetime) -> IdempotencyRecord:
        """Stores `record` and returns it, or returns the record already stored under its id.

        Waits while another transaction stores the same id, so that only one of two concurrent requests gets its own.
        """
        same_id = IdempotencyRecord.id == record.id
        self._session.execute(delete(IdempotencyRecord).where(same_id, IdempotencyRecord.kept_until <= now))
        try:
            with self._session.begin_nested():
                self._session.add(record)
        except IntegrityError:
            return self._session.scalars(select(IdempotencyRecord).where(same_id)).one()
        return record

    def forget(self, now: datetime, limit: int) -> None:
        """Deletes up to `limit` expired records, except those that another transaction is deleting."""
        expired = select(IdempotencyRecord.number).where(IdempotencyRecord.kept_until <= now).limit(limit)
        numbers = self._session.scalars(expired.with_for_update(skip_locked=True)).all()
        self._session.execute(delete(IdempotencyRecord).where(IdempotencyRecord.number.in_(numbers)))


class KeyReused(BadRequest):
    """This Idempotency-Key was used for another request; use a new key for each new request."""

    status, code, title = 422, "idempotency-key-reused", "Idempotency key reused"


@dataclass(frozen=True)
class SavedResponse:
    """The status, headers and body of a response."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Sender:
    """The bearer token and Idempotency-Key of a request."""

    bearer: str
    key: str

    @property
    def id(self) -> str:
        """The id of the record."""
        return sha256_hex(f"{self.bearer}\n{self.key}".encode())

    def cipher(self) -> AESGCM:
        """The cipher of the stored response. A bearer token has 256 random bits, so HKDF needs no stretching."""
        info = b"mobizo idempotency record\n" + self.key.encode()
        return AESGCM(HKDF(SHA256(), length=32, salt=None, info=info).derive(self.bearer.encode()))


RETENTION = timedelta(days=1)  # for which responses are kept


class IdempotencyService:
    """Idempotency records in one writing transaction."""

    def __init__(self, session: Session) -> None:
        self._records = IdempotencyRepository(session)

    def begin(self, sender: Sender, fingerprint: str) -> tuple[IdempotencyRecord, SavedResponse | None]:
        """Returns this request's record, and its response if the request was executed before.

        Raises KeyReused if the key was used for a request with another fingerprint.
        """
        now = utc_now()
        self._records.forget(now, EXPIRED_PER_REQUEST)
        new = IdempotencyRecord(id=sender.id, fingerprint=fingerprint, sealed=b"", kept_until=now + RETENTION)
        record = self._records.claim(new, now)
        if record is new:
            return record, None
        if record.fingerprint != fingerprint:
            raise KeyReused
        return record, _open(record.sealed, sender)

    @staticmethod
    def keep(record: IdempotencyRecord, sender: Sender, response: SavedResponse) -> None:
        """Encrypts the response into its record."""
        text = json.dumps([response.status, response.headers, response.body.decode()]).encode()
        nonce = secrets.token_bytes(NONCE_BYTES)
        record.sealed = nonce + sender.cipher().encrypt(nonce, text, record.id.encode())


def _open(sealed: bytes, sender: Sender) -> SavedResponse:
    text = sender.cipher().decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], sender.id.encode())
    status, headers, body = json.loads(text)
    return SavedResponse(status, headers, body.encode())


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
    record, response = IdempotencyService(session).begin(sender, fingerprint)
    if response is not None:
        raise AlreadyAnswered(response)
    request.state.response_recorder = ResponseRecorder(record, sender)


Once = Annotated[None, Depends(keep_once)]
