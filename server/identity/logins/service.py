"""Logins that wait for a person: their table, SQL and rules.

A program shows a short code, and a signed-in person who may create tokens confirms it. The token is created when the
program polls for it, as if that person had created it at that moment: it belongs to the person's tenant and user, has
at most the scopes and the lifetime of the person's token, and its text is shown once, to the holder of the device code.
The database holds digests of both codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from sqlalchemy import String
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Numbered, Table, utc_now
from server.identity.audit import AccessAction, AccessTrail, Subject
from server.identity.oauth import (
    EXPIRED_KEPT_FOR,
    POLL_INTERVAL_SECONDS,
    REQUEST_SECONDS,
    CodeRequest,
    CodeRequests,
    OAuthError,
    RequestCodes,
    RequestState,
    format_user_code,
    new_user_code,
    read_user_code,
)
from server.identity.token_issuing import TokenIssuingService
from server.identity.tokens import (
    TOKEN_DAYS,
    Principal,
    ScopeWords,
    TokenRepository,
    TokenService,
    new_token,
    token_digest,
)
from shared.access import LoginRequestView, Role, Scope, TokenGrant, TokenRequest
from shared.errors import Conflict, Forbidden, MobizoError, NotFound, QuotaExceeded

WAITING_PER_ADDRESS = 10  # logins at once
WAITING_IN_ALL = 1000


class LoginRequest(CodeRequest, Numbered, Table):
    """A program that asks for a token. name: of the program, as it says."""

    __tablename__ = "login_requests"

    user_code_digest: Mapped[str] = mapped_column(String(64), unique=True)
    scopes: Mapped[frozenset[Scope]] = mapped_column(ScopeWords)  # asked for, then granted; none: all of the person's


class LoginService:
    """Logins by a code, in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._requests = CodeRequests(session, LoginRequest, LoginRequest.user_code_digest)

    def ask(self, client_id: str, name: str, scopes: frozenset[Scope], address: str) -> RequestCodes:
        """Begins a request. Raises OAuthError if too many wait, of the address or in all."""
        now = utc_now()
        self._requests.forget(now - EXPIRED_KEPT_FOR)
        if self._requests.waiting(now, address) >= WAITING_PER_ADDRESS:
            raise OAuthError("slow_down", "too many logins of this address wait; try again in some minutes", 429)
        if self._requests.waiting(now) >= WAITING_IN_ALL:
            raise OAuthError(
                "slow_down", "too many logins wait; log in with a token, or try again in some minutes", 429
            )
        device_code, user_code = new_token("login"), new_user_code()
        self._requests.add(
            LoginRequest(
                device_code_digest=token_digest(device_code),
                user_code_digest=_digest(user_code),
                client_id=client_id,
                name=name,
                scopes=scopes,
                address=address,
                state=RequestState.PENDING,
                interval_seconds=POLL_INTERVAL_SECONDS,
                created_at=now,
                expires_at=now + timedelta(seconds=REQUEST_SECONDS),
            )
        )
        return RequestCodes(device_code, format_user_code(user_code), REQUEST_SECONDS, POLL_INTERVAL_SECONDS)

    def waits(self, client_id: str, device_code: str) -> bool:
        """Whether a request waits for a person. Unlike `poll`, it changes nothing and may be asked at any time."""
        request = self._requests.by_device_code(device_code, lock=False)
        return (
            request is not None
            and request.client_id == client_id
            and request.state is RequestState.PENDING
            and request.expires_at > utc_now()
        )

    def poll(self, client_id: str, device_code: str, days: int = TOKEN_DAYS) -> TokenGrant | OAuthError:
        """Returns the token once, or an error, which is returned so that the transaction is committed.

        days: for which the token is valid. It expires with the token of the person who confirmed at the latest.

        Raises QuotaExceeded.
        """
        request = self._requests.by_device_code(device_code, lock=True)
        if request is None or request.client_id != client_id or request.state is RequestState.USED:
            return OAuthError("invalid_grant", "the device code is not known here, or was used; log in again")
        tenant = request.polled(utc_now(), "the login was refused", "nobody confirmed the code in time; log in again")
        if isinstance(tenant, OAuthError):
            return tenant
        token = TokenRepository(self._session).of_tenant(tenant, request.decided_by or "")
        try:
            person = TokenService(self._session).principal_of("" if token is None else token.digest)
            grant = self._grant(person, request, days)
        except QuotaExceeded:
            raise  # the token is rolled back; the program may ask again
        except MobizoError as error:
            request.state = RequestState.DENIED
            return OAuthError(
                "access_denied", f"the token of the person who confirmed does not allow it: {error.detail}"
            )
        request.state = RequestState.USED
        return grant

    def _grant(self, person: Principal, request: LoginRequest, days: int) -> TokenGrant:
        role = Role.OPERATOR if person.role is Role.OPERATOR else Role.APP
        scopes = sorted(request.scopes)
        token_request = TokenRequest(name=request.name, role=role, scopes=scopes, expires_in_days=days)
        return TokenIssuingService(self._session, person).make(token_request)

    def find(self, principal: Principal, user_code: str) -> LoginRequestView:
        """Returns a request by its code, with the scopes that the person would grant. Raises NotFound."""
        request = self._find(principal, user_code, lock=False)
        return _view(request, user_code, self._granted(principal, request))

    def decide(
        self, principal: Principal, user_code: str, approved: bool, scopes: Iterable[Scope] | None = None
    ) -> LoginRequestView:
        """Grants or refuses a login; the first decision counts. scopes: to be granted; None: those asked for.

        Raises NotFound, Forbidden for scopes that the person's token lacks, or Conflict if it was decided otherwise.
        """
        request = self._find(principal, user_code, lock=True)
        if request.state is RequestState.PENDING:
            if approved:
                granted = self._granted(principal, request) if scopes is None else frozenset(scopes)
                if excess := granted - principal.scopes:
                    raise Forbidden(f"your token lacks: {', '.join(sorted(excess))}", missing=sorted(excess))
                request.scopes = granted
            request.state = RequestState.APPROVED if approved else RequestState.DENIED
            request.tenant, request.decided_by, request.decided_at = principal.tenant, principal.token_id, utc_now()
            action = AccessAction.LOGIN_APPROVED if approved else AccessAction.LOGIN_DENIED
            AccessTrail(self._session).add(principal.tenant, principal, action, Subject(request.name))
        elif approved == (request.state is RequestState.DENIED):
            raise Conflict(f"the login was {'refused' if approved else 'confirmed'} before; the program may ask again")
        return _view(request, user_code, request.scopes)

    def _granted(self, principal: Principal, request: LoginRequest) -> frozenset[Scope]:
        if request.state is not RequestState.PENDING:
            return request.scopes
        return request.scopes & principal.scopes if request.scopes else principal.scopes

    def _find(self, principal: Principal, user_code: str, lock: bool) -> LoginRequest:
        code = read_user_code(user_code)
        request = None if code is None else self._requests.by_user_code(_digest(code), lock)
        if request is not None and request.state is RequestState.PENDING and request.expires_at <= utc_now():
            request = None
        if request is None or request.tenant not in (None, principal.tenant):
            raise NotFound("no login waits with this code; compare it with the program, whose codes last 15 minutes")
        return request


def _digest(user_code: str) -> str:
    """Returns the stored digest of a user code. It differs from that of a token with the same text."""
    return token_digest(f"login:{user_code}")


def _view(request: LoginRequest, user_code: str, scopes: frozenset[Scope]) -> LoginRequestView:
    return LoginRequestView(
        user_code=format_user_code(read_user_code(user_code) or ""),
        name=request.name,
        address=request.address,
        scopes=sorted(scopes),
        state=request.state.value,
        created_at=request.created_at,
        expires_at=request.expires_at,
    )
