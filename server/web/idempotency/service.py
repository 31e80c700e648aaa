"""Stores a request's response in the transaction of its effect, and returns it when the request is retried.

A response may contain a token that is shown once, so it is encrypted with a key derived from the request's bearer token
and Idempotency-Key. The database holds only digests of both and therefore cannot decrypt a response.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from datetime import timedelta

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sqlalchemy.orm import Session

from server.clock import utc_now
from server.web.idempotency.models import IdempotencyRecord
from server.web.idempotency.repository import IdempotencyRepository
from shared.canonical import sha256_hex
from shared.errors import BadRequest

NONCE_BYTES = 12
EXPIRED_PER_REQUEST = 20  # more than one request adds, so that expired records cannot accumulate


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


class IdempotencyService:
    """Idempotency records in one writing transaction."""

    def __init__(self, session: Session, kept_seconds: float) -> None:
        self._records = IdempotencyRepository(session)
        self._kept = timedelta(seconds=kept_seconds)

    def begin(self, sender: Sender, fingerprint: str) -> tuple[IdempotencyRecord, SavedResponse | None]:
        """Returns this request's record, and its response if the request was executed before.

        Raises KeyReused if the key was used for a request with another fingerprint.
        """
        now = utc_now()
        self._records.forget(now, EXPIRED_PER_REQUEST)
        new = IdempotencyRecord(id=sender.id, fingerprint=fingerprint, sealed=b"", kept_until=now + self._kept)
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
