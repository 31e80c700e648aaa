"""Keeping a request's answer in the transaction of its effect, and giving it again. Knows no HTTP.

An answer may carry a token that is shown once, so it is kept encrypted, by a key made of the request's own bearer token
and Idempotency-Key. The database holds digests of both only: who reads it can open no answer.
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

from server.answers.models import KeptAnswer
from server.answers.repository import AnswerRepository
from server.clock import utc_now
from shared.canonical import sha256_hex
from shared.errors import BadRequest

NONCE_BYTES = 12
FORGOTTEN_AT_ONCE = 20  # more than one new answer brings, so that old ones cannot pile up


class KeyReused(BadRequest):
    """This Idempotency-Key was used for another request; take a new key for each new request."""

    status, code, title = 422, "idempotency-key-reused", "Idempotency key reused"


@dataclass(frozen=True)
class Answer:
    """What a request is answered."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Sender:
    """Who sends a request, and the name that they gave to it."""

    bearer: str
    key: str

    @property
    def id(self) -> str:
        """What the answer is found by."""
        return sha256_hex(f"{self.bearer}\n{self.key}".encode())

    def cipher(self) -> AESGCM:
        """What opens the answer. A bearer token has 256 random bits, so that nothing needs to slow guesses down."""
        info = b"mobizo kept answer\n" + self.key.encode()
        return AESGCM(HKDF(SHA256(), length=32, salt=None, info=info).derive(self.bearer.encode()))


class AnswerService:
    """Kept answers in one writing transaction."""

    def __init__(self, session: Session, kept_seconds: float) -> None:
        self._answers = AnswerRepository(session)
        self._kept = timedelta(seconds=kept_seconds)

    def begin(self, sender: Sender, fingerprint: str) -> tuple[KeptAnswer, Answer | None]:
        """The place of this request's answer, and the answer if it was given before.

        Raises KeyReused if the key named a request of another fingerprint.
        """
        now = utc_now()
        self._answers.forget(now, FORGOTTEN_AT_ONCE)
        new = KeptAnswer(id=sender.id, fingerprint=fingerprint, sealed=b"", kept_until=now + self._kept)
        place = self._answers.claim(new, now)
        if place is new:
            return place, None
        if place.fingerprint != fingerprint:
            raise KeyReused
        return place, _open(place.sealed, sender)

    @staticmethod
    def keep(place: KeptAnswer, sender: Sender, answer: Answer) -> None:
        """Writes the answer to its place."""
        text = json.dumps([answer.status, answer.headers, answer.body.decode()]).encode()
        nonce = secrets.token_bytes(NONCE_BYTES)
        place.sealed = nonce + sender.cipher().encrypt(nonce, text, place.id.encode())


def _open(sealed: bytes, sender: Sender) -> Answer:
    text = sender.cipher().decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], sender.id.encode())
    status, headers, body = json.loads(text)
    return Answer(status, headers, body.encode())
