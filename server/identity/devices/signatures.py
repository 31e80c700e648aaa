"""Whether a device signed what it sends, and that it counts once: FastAPI dependencies of what only devices may call.

    session: SignedWriting          writes, and spends the signature's nonce in the same transaction
    signature: Signature            no nonce is spent: asking for a job twice does nothing more than asking once
    signature: WholeResultSignature    where the default settings require one; the route spends it (`spending`)

The body of these is whole in memory by then and is held against its digest. One that is read in pieces is the route's
to hold against it (`ResultSignature`, `spending`).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.orm import Session

from server.clock import utc_now
from server.identity.access_rules import Device
from server.identity.devices.repository import NonceRepository, Spent
from server.identity.tokens import Principal
from server.settings import Settings
from server.web.openapi import may_raise
from server.web.state import AppState, State
from shared.errors import BadSignature, ClockSkew, DigestMismatch, MobizoError, Replayed, Unavailable, Untrusted
from shared.request_signature import RequestSignature, is_signed, parse_signature
from shared.signing import parse_public

Kind = Literal["results", "all"]  # the setting from which on such a request must be signed
SMALL_BYTES = 1 << 16  # hashed without a thread
MISMATCH = "the body is not what its Content-Digest says; it was changed on the way, and nothing of it was kept"


@dataclass(frozen=True)
class Target:
    """What a signature covers beside the body, as it was sent."""

    method: str
    path: str
    query: str

    @classmethod
    def of(cls, request: Request) -> Target:
        """The request's."""
        path = request.scope.get("raw_path") or request.url.path.encode()
        return cls(request.method, path.decode("latin-1"), request.scope["query_string"].decode("latin-1"))


def check_signature(
    settings: Settings, principal: Principal, target: Target, headers: Mapping[str, str], kind: Kind
) -> RequestSignature | None:
    """The signature of a device's request, found good but for its body and nonce; None if it needs none and has none.

    Raises BadSignature or ClockSkew.
    """
    if not is_signed(headers) and settings.signed_requests not in ("all", kind):
        return None
    signature = parse_signature(headers)
    try:
        key = parse_public(principal.public_key or "")
    except Untrusted as error:
        raise BadSignature("this device enrolled without a key; enroll it again") from error
    signature.verify(key, target.method, target.path, target.query)
    _check_time(signature, utc_now(), settings.signature_skew_seconds)
    return signature


def _check_time(signature: RequestSignature, now: datetime, allowed: int) -> None:
    off = signature.created - now.timestamp()
    if abs(off) > allowed:
        told = now.isoformat(timespec="seconds")
        side = "ahead of" if off > 0 else "behind"
        raise ClockSkew(
            f"the signature's time is {abs(off):.0f} s {side} the server's, {told}; at most {allowed} s are allowed",
            server_time=told,
            allowed_seconds=allowed,
        )


def spent_by(state: AppState, device_id: str, signature: RequestSignature) -> Spent:
    """The nonce of a signature, and as long as it is good."""
    made = datetime.fromtimestamp(signature.created, UTC)
    return Spent(device_id, signature.nonce, made + timedelta(seconds=state.settings.signature_skew_seconds + 1))


def spend(session: Session, state: AppState, device_id: str, signature: RequestSignature) -> None:
    """Notes the nonce as long as its signature is good. Raises Replayed if it is spent."""
    if not NonceRepository(session).spend_all([spent_by(state, device_id, signature)], utc_now()):
        raise Replayed


def spend_ahead(state: AppState, device_id: str, signature: RequestSignature | None) -> None:
    """Spends a nonce by itself, before a body is read. Raises Replayed."""
    if signature is not None:
        with state.database.writing() as session:
            spend(session, state, device_id, signature)


def check_digest(signature: RequestSignature | None, digest: bytes) -> None:
    """Raises DigestMismatch unless the body that arrived, by its sha256, is the one that was signed."""
    if signature is not None and digest != signature.digest:
        raise DigestMismatch(MISMATCH)


@may_raise(BadSignature, ClockSkew, DigestMismatch)
@dataclass(frozen=True)
class _Check:
    """A dependency: the request's signature. whole: its body is small, and is held against its digest here."""

    kind: Kind
    whole: bool

    async def __call__(self, principal: Device, request: Request, state: State) -> RequestSignature | None:
        """Raises BadSignature, ClockSkew or DigestMismatch."""
        # A tenth of a millisecond, in which the key came with the token: less than a thread's turn would cost.
        signature = check_signature(state.settings, principal, Target.of(request), request.headers, self.kind)
        if signature is not None and self.whole:
            body = await request.body()
            small = len(body) <= SMALL_BYTES
            check_digest(signature, _sha256(body) if small else await run_in_threadpool(_sha256, body))
        return signature


def _sha256(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


Signature = Annotated[RequestSignature | None, Depends(_Check("all", whole=True))]
ResultSignature = Annotated[RequestSignature | None, Depends(_Check("results", whole=False))]
WholeResultSignature = Annotated[RequestSignature | None, Depends(_Check("results", whole=True))]


@contextmanager
def spending(state: AppState, principal: Principal, signature: RequestSignature | None) -> Iterator[Session]:
    """A writing transaction that spends a signature's nonce, also where what it is for is refused."""
    device_id = principal.device_id or ""
    try:
        with state.database.writing() as session:
            if signature is not None:
                spend(session, state, device_id, signature)
            yield session
    except (Replayed, Unavailable):
        # Nothing was done, and the same may be done again.
        raise
    except MobizoError:
        # What it asked for was refused, and its nonce was given back with the rest; it is spent all the same.
        spend_ahead(state, device_id, signature)
        raise


@may_raise(Replayed)
async def _writing(principal: Device, state: State, signature: Signature) -> AsyncIterator[Session]:
    async with state.write_queue.holding(spending(state, principal, signature)) as session:
        yield session


SignedWriting = Annotated[Session, Depends(_writing, scope="function")]
