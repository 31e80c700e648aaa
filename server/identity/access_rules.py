"""The rule of every route: who may call it. FastAPI dependencies; a route has exactly one, as its first parameter.

    principal: Annotated[Principal, needs(Scope.JOBS_READ)]    a person or service whose token has the scope
    principal: Annotated[Principal, needs(Scope.JOBS_READ, or_device=True)]    or any device
    principal: Annotated[Principal, needs()]                   a person or service, whatever its scopes
    principal: Device                                          a device
    bearer: Enrolling                                          the bearer of a one-time token, which the route checks
    dependencies=[PUBLIC]                                      anyone; in the route's decorator
    dependencies=[PROBE]                                       anyone, as often as they like: for health checks

The router calls a rule's `admit` before it reads any of the request's body; the dependency then returns its result.
A rule is the first parameter, because FastAPI resolves parameters in their order and a transaction must not begin for a
caller without the right to it. tests/server/identity/test_matrix.py finds routes without a rule, and rules that come
late.

A device's request may also be signed, and then counts once:

    session: SignedWriting          writes, and spends the signature's nonce in the same transaction
    signature: Signature            no nonce is spent: asking for a job twice does nothing more than asking once
    signature: WholeResultSignature    where the default settings require one; the route spends it (`spending`)

The body of these is whole in memory by then and is held against its digest. One that is read in pieces is the route's
to hold against it (`ResultSignature`, `spending`).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Concatenate, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.identity.devices.repository import NonceRepository, SpentNonce
from server.identity.tokens import DevicePrincipal, Principal, TokenService, make_last_used, token_digest
from server.settings import Settings
from server.web.openapi import may_raise
from server.web.routes import Rule
from server.web.state import Answer, AppState, Arguments, Group, State, address_of, group_read
from server.web.tenant_turns import MAX_REQUESTS, Places
from shared.access import Role, Scope
from shared.errors import (
    BadSignature,
    ClockSkew,
    DigestMismatch,
    Forbidden,
    MobizoError,
    ReplayedRequest,
    TenantSuspended,
    TooManyRequests,
    Unauthorized,
    Unavailable,
    Untrusted,
)
from shared.request_signature import RequestSignature, is_signed, parse_signature
from shared.signing import parse_public

Kind = Literal["results", "all"]  # the setting from which on such a request must be signed
SKEW_SECONDS = 300  # that a signature's time may differ from this server's
# Callers that are looked up at the same time: hundreds of one token at once would occupy the event loop.
ADMISSIONS = Places("admission", 8, MAX_REQUESTS)
SMALL_BYTES = 1 << 16  # hashed without a thread
MISMATCH = "the body is not what its Content-Digest says; it was changed on the way, and nothing of it was kept"
_scheme = HTTPBearer(auto_error=False, description="a token issued by `mobizo-server`, or by enrollment")
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_scheme)]  # for the API's description


def make_lookups(state: AppState) -> Group[str, Principal]:
    """Makes the lookup of tokens, for `AppState.get`."""

    def read(session: Session, bearers: Sequence[str]) -> list[Principal | Exception]:
        return TokenService(session).principals(bearers)

    return group_read(state.database, read)


async def _bearer(request: Request, state: AppState) -> str:
    """Returns the token of a request. Raises Unauthorized if there is none, TooManyRequests."""
    credentials = await _scheme(request)
    if credentials is None or not credentials.credentials:
        state.limits.anonymous(address_of(request))
        raise Unauthorized
    return credentials.credentials


@may_raise(Unauthorized, Forbidden, TenantSuspended, TooManyRequests)
@dataclass(frozen=True)
class Holder(Rule):
    """Admits a live token: of a person or service with all of `scopes`, or of a device."""

    scopes: frozenset[Scope]
    people: bool
    devices: bool
    needs_token: ClassVar[bool] = True
    checks_token: ClassVar[bool] = True

    async def __call__(self, request: Request, credentials: _Credentials) -> Principal:
        """Returns the caller that `admit` looked up."""
        principal: Principal = request.state.principal
        return principal

    async def admit(self, request: Request) -> None:
        """Looks the token up. Raises Unauthorized, TenantSuspended, Forbidden or TooManyRequests."""
        state: AppState = request.app.state.mobizo
        text = await _bearer(request, state)
        digest, address = token_digest(text), address_of(request)
        with state.limits.checking(digest, address):
            async with state.get(ADMISSIONS.make).turn(state.limits.sender(digest, address)):
                principal = await state.get(make_lookups).add(text)
        state.get(make_last_used).note(principal.token_number, utc_now())
        if principal.role is Role.DEVICE:
            if not self.devices:
                raise Forbidden("a device's token may not do that; it takes an operator's or an app's")
        elif not self.people:
            raise Forbidden(f"a token of role {principal.role} may not do that; it takes a device's")
        elif missing := self.scopes - principal.scopes:
            raise Forbidden(f"the token lacks: {', '.join(sorted(missing))}", missing=sorted(missing))
        request.state.principal = principal


@may_raise(Unauthorized, TooManyRequests)
@dataclass(frozen=True)
class OneTime(Rule):
    """Admits any token; the route uses it up or rejects it."""

    needs_token: ClassVar[bool] = True

    async def __call__(self, request: Request, state: State, credentials: _Credentials) -> AsyncIterator[str]:
        """Returns the token's text. If the route rejects it, that counts against the caller's address."""
        text: str = request.state.bearer
        try:
            yield text
        except Unauthorized:
            state.limits.refused(token_digest(text), address_of(request))
            raise

    async def admit(self, request: Request) -> None:
        """Finds a token of any kind. Raises Unauthorized if there is none, TooManyRequests."""
        state: AppState = request.app.state.mobizo
        text = await _bearer(request, state)
        state.limits.before(token_digest(text), address_of(request))
        request.state.bearer = text


@may_raise(TooManyRequests)
@dataclass(frozen=True)
class Open(Rule):
    """Admits any caller, with or without a token."""

    limited: bool

    async def __call__(self) -> None:
        """Does nothing: `admit` has counted the request."""

    async def admit(self, request: Request) -> None:
        """Counts the request. Raises TooManyRequests."""
        if self.limited:
            state: AppState = request.app.state.mobizo
            state.limits.anonymous(address_of(request))


def needs(*scopes: Scope, or_device: bool = False) -> Any:
    """Returns the rule for people and services whose token has all `scopes`; `or_device`: and for any device."""
    return Depends(Holder(frozenset(scopes), people=True, devices=or_device))


Device = Annotated[DevicePrincipal, Depends(Holder(frozenset(), people=False, devices=True))]
# "function": it sees what the endpoint raises, which becomes the response afterwards.
Enrolling = Annotated[str, Depends(OneTime(), scope="function")]
PUBLIC = Depends(Open(limited=True))
PROBE = Depends(Open(limited=False))


def device_key(principal: DevicePrincipal) -> Ed25519PublicKey:
    """Returns the key that a device enrolled with. Raises BadSignature if it enrolled without one."""
    try:
        return parse_public(principal.public_key or "")
    except Untrusted as error:
        raise BadSignature("this device enrolled without a key; enroll it again") from error


def check_signature(
    settings: Settings, principal: DevicePrincipal, request: Request, kind: Kind
) -> RequestSignature | None:
    """Returns the verified signature of a device's request, whose body and nonce are checked later; None without one.

    Raises BadSignature or ClockSkew.
    """
    if not is_signed(request.headers) and settings.signed_requests not in ("all", kind):
        return None
    signature = parse_signature(request.headers)
    key = device_key(principal)
    # As they were sent.
    path = request.scope.get("raw_path") or request.url.path.encode()
    query = request.scope["query_string"]
    signature.verify(key, request.method, path.decode("latin-1"), query.decode("latin-1"))
    _check_time(signature, utc_now())
    return signature


def _check_time(signature: RequestSignature, now: datetime) -> None:
    off = signature.created - now.timestamp()
    if abs(off) > SKEW_SECONDS:
        server_time = now.isoformat(timespec="seconds")
        side = "ahead of" if off > 0 else "behind"
        raise ClockSkew(
            f"the signature's time is {abs(off):.0f} s {side} the server's, {server_time}; "
            f"at most {SKEW_SECONDS} s are allowed",
            server_time=server_time,
            allowed_seconds=SKEW_SECONDS,
        )


def spent_nonce(device_id: str, signature: RequestSignature) -> SpentNonce:
    """Returns the nonce of a signature, and the time until which the nonce is kept."""
    created = datetime.fromtimestamp(signature.created, UTC)
    # Longer than the signature is good, because the host that removes the nonce has a clock of its own.
    return SpentNonce(device_id, signature.nonce, created + timedelta(seconds=2 * SKEW_SECONDS))


def spend(session: Session, device_id: str, signature: RequestSignature) -> None:
    """Notes the nonce as long as its signature is good. Raises ReplayedRequest if it is spent."""
    if not NonceRepository(session).spend_all([spent_nonce(device_id, signature)]):
        raise ReplayedRequest


def spend_ahead(state: AppState, device_id: str, signature: RequestSignature | None) -> None:
    """Spends a nonce by itself, before a body is read. Raises ReplayedRequest."""
    if signature is not None:
        with state.database.writing() as session:
            spend(session, device_id, signature)


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
        signature = check_signature(state.settings, principal, request, self.kind)
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
def spending(state: AppState, principal: DevicePrincipal, signature: RequestSignature | None) -> Iterator[Session]:
    """A writing transaction that spends the nonce of a signature, even if the request is refused."""
    device_id = principal.device_id
    try:
        with state.database.writing() as session:
            if signature is not None:
                spend(session, device_id, signature)
            yield session
    except (ReplayedRequest, Unavailable):
        # Nothing was done, and the same may be done again.
        raise
    except MobizoError:
        # The rollback of a refused request also removed its nonce, which must not be used again.
        spend_ahead(state, device_id, signature)
        raise


async def write_signed(
    state: AppState,
    principal: DevicePrincipal,
    signature: RequestSignature | None,
    write: Callable[Concatenate[Session, Arguments], Answer],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Answer:
    """Calls a function in a writing transaction that spends the nonce of a signature, in one thread."""

    def transact() -> Answer:
        with spending(state, principal, signature) as session:
            return write(session, *args, **kwargs)

    return await state.write_queue.run(transact)


@may_raise(ReplayedRequest)
async def _writing(principal: Device, state: State, signature: Signature) -> AsyncIterator[Session]:
    async with state.write_queue.holding(spending(state, principal, signature)) as session:
        yield session


SignedWriting = Annotated[Session, Depends(_writing, scope="function")]
