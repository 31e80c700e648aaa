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
from sqlalchemy import LargeBinary, String, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Numbered, Table, UtcTime, utc_now
from server.database.database import insert_or
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
RETENTION = timedelta(days=1)  # for which responses are kept


class IdempotencyRecord(Numbered, Table):
    """The response to one request. `id` is a digest of its token and Idempotency-Key, neither of which is stored."""

    __tablename__ = "kept_answers"

    id: Mapped[str] = mapped_column(String(64), unique=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    sealed: Mapped[bytes] = mapped_column(LargeBinary)
    kept_until: Mapped[datetime] = mapped_column(UtcTime, index=True)


def purge_records(session: Session, now: datetime) -> None:
    """Removes the responses whose time is over."""
    session.execute(delete(IdempotencyRecord).where(IdempotencyRecord.kept_until <= now))


class KeyReused(BadRequest, status=422, code="idempotency-key-reused"):
    """This Idempotency-Key was used for another request; use a new key for each new request."""


class AlreadyAnswered(Exception):
    """Carries the stored response out of the dependency; not an error."""

    def __init__(self, response: Response) -> None:
        self.response = response
        super().__init__()


@dataclass(frozen=True)
class ResponseRecorder:
    """Stores the response to a request in its record, encrypted, and reads it again."""

    record: IdempotencyRecord
    cipher: AESGCM

    @classmethod
    def of(cls, record: IdempotencyRecord, bearer: str, key: str) -> ResponseRecorder:
        """Returns the recorder of a request. A bearer token has 256 random bits, so HKDF needs no stretching."""
        info = b"mobizo idempotency record\n" + key.encode()
        return cls(record, AESGCM(HKDF(SHA256(), length=32, salt=None, info=info).derive(bearer.encode())))

    def keep(self, response: Response) -> None:
        """Stores the response in the request's transaction."""
        headers = {name: value for name, value in response.headers.items() if name not in _NOT_KEPT}
        text = json.dumps([response.status_code, headers, bytes(response.body).decode()]).encode()
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.record.sealed = nonce + self.cipher.encrypt(nonce, text, self.record.id.encode())

    def response(self) -> Response:
        """Returns the stored response."""
        nonce, sealed = self.record.sealed[:NONCE_BYTES], self.record.sealed[NONCE_BYTES:]
        status, headers, body = json.loads(self.cipher.decrypt(nonce, sealed, self.record.id.encode()))
        return Response(body.encode(), status, {**headers, REPLAYED: "true"})


def _claim(session: Session, record_id: str, fingerprint: str, now: datetime) -> tuple[IdempotencyRecord, bool]:
    """Stores a record, in place of an expired one; returns the record with this id, and whether it is the new one.

    Waits while another transaction stores the same id, so that only one of two concurrent requests gets its own.
    """
    columns = {"fingerprint": fingerprint, "sealed": b"", "kept_until": now + RETENTION}
    insert = insert_or(session, IdempotencyRecord).values(id=record_id, **columns)
    store = insert.on_conflict_do_update(index_elements=["id"], set_=columns, where=IdempotencyRecord.kept_until <= now)
    stored: IdempotencyRecord | None = session.scalars(store.returning(IdempotencyRecord)).one_or_none()
    if stored is not None:
        return stored, True
    return session.scalars(select(IdempotencyRecord).where(IdempotencyRecord.id == record_id)).one(), False


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
    bearer, now = request.headers["authorization"].partition(" ")[2], utc_now()
    record_id = sha256_hex(f"{bearer}\n{key}".encode())
    record, new = _claim(session, record_id, fingerprint, now)
    recorder = ResponseRecorder.of(record, bearer, key)
    if not new:
        if record.fingerprint != fingerprint:
            raise KeyReused
        raise AlreadyAnswered(recorder.response())
    request.state.response_recorder = recorder


Once = Annotated[None, Depends(keep_once)]
