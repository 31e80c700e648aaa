"""The device authorization grant (RFC 8628): what requests of devices and logins of people have in common.

A client holds a device code, of which only the digest is kept; a person reads the user code to someone who may approve.
User codes have forty random bits in Crockford's base32: digits and capital letters without I, L, O and U. I, L and O
are read as the digits that they resemble. Dashes, spaces and case do not count.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl, quote

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import String, delete, func, select
from sqlalchemy.orm import InstrumentedAttribute, Mapped, Session, mapped_column

from server.database.columns import UtcTime, text_enum
from server.database.database import lock_name
from server.identity.tokens import token_digest
from server.web.bodies import pieces_of
from server.web.openapi import Responses, raises
from shared.errors import MobizoError, QuotaExceeded, TooLarge, TooSlow
from shared.protocol import GRANT_TYPE, DeviceAuthorization

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
LENGTH = 8  # characters of five bits
_LOOKS_LIKE = str.maketrans("ILO", "110")
_CODE = re.compile(rf"[{ALPHABET}]{{{LENGTH}}}")
POLL_INTERVAL_SECONDS = 5  # minimum seconds between two polls of a joining device or a login
REQUEST_SECONDS = 900  # that a request waits for a person
SLOWER_SECONDS = 5  # that each question asked too early adds to the interval (RFC 8628, 3.5)
EXPIRED_KEPT_FOR = timedelta(hours=1)  # after its end, so that a client that asks late is told that it was late
FORM = "application/x-www-form-urlencoded"
MAX_FORM_BYTES = 16_384
NO_STORE = {"Cache-Control": "no-store", "Pragma": "no-cache"}  # RFC 6749, 5.1
_OAUTH_ERROR = {
    "description": "an error in OAuth's form (RFC 6749, 5.2)",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error", "error_description"],
                "properties": {"error": {"type": "string"}, "error_description": {"type": "string"}},
            }
        }
    },
}
OAUTH: Responses = {**raises(QuotaExceeded, TooLarge, TooSlow), 400: _OAUTH_ERROR, 429: _OAUTH_ERROR}


class OAuthError(MobizoError):
    """The request was refused in OAuth's words."""

    status, code, title = 400, "oauth", "OAuth error"

    def __init__(self, error: str, detail: str, status: int = 400) -> None:
        """error: of RFC 6749 or RFC 8628. status: of HTTP."""
        super().__init__(detail)
        self.error, self.http_status = error, status


class RequestState(StrEnum):
    """The state of a request that waits for a person's decision."""

    PENDING = "pending"
    APPROVED = "approved"
    DENIED = "denied"
    USED = "used"  # approved, and the client has its token


class CodeRequest:
    """The columns of a request with a device code."""

    device_code_digest: Mapped[str] = mapped_column(String(64), unique=True)
    client_id: Mapped[str] = mapped_column(String(100))
    name: Mapped[str] = mapped_column(String(96))
    address: Mapped[str] = mapped_column(String(64), index=True)  # that it came from
    state: Mapped[RequestState] = mapped_column(text_enum(RequestState))
    interval_seconds: Mapped[int] = mapped_column()
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    expires_at: Mapped[datetime] = mapped_column(UtcTime, index=True)
    polled_at: Mapped[datetime | None] = mapped_column(UtcTime)
    tenant: Mapped[str | None] = mapped_column(String(96))  # of the person who decided
    decided_by: Mapped[str | None] = mapped_column(String(64))  # that person's token
    decided_at: Mapped[datetime | None] = mapped_column(UtcTime)

    def polled(self, now: datetime, denied: str, expired: str) -> str | OAuthError:
        """Records a question of the client; returns the tenant whose person approved, or why there is no token.

        denied, expired: what the error says. A question that comes before the interval is over makes it longer.
        """
        early = self.polled_at is not None and now < self.polled_at + timedelta(seconds=self.interval_seconds)
        self.polled_at = now
        if self.state is RequestState.DENIED:
            return OAuthError("access_denied", denied)
        if self.expires_at <= now:
            return OAuthError("expired_token", expired)
        if early:
            self.interval_seconds += SLOWER_SECONDS
            return OAuthError("slow_down", f"ask every {self.interval_seconds} s at most")
        if self.state is RequestState.PENDING or self.tenant is None:
            return OAuthError("authorization_pending", "nobody has decided yet")
        return self.tenant


R = TypeVar("R", bound=CodeRequest)


class CodeRequests(Generic[R]):
    """The requests of one table, in one session."""

    def __init__(self, session: Session, table: type[R], user_code: InstrumentedAttribute[str]) -> None:
        """user_code: the column by which a person's code is found."""
        self._session, self._table, self._user_code = session, table, user_code

    def add(self, request: R) -> None:
        """Stores a new request."""
        self._session.add(request)
        self._session.flush()

    def waiting(self, now: datetime, address: str | None = None) -> int:
        """Returns the number of requests, optionally of one address, that are neither decided nor expired.

        Requests of other transactions are added before or after this one.
        """
        lock_name(self._session, self._table.__name__)
        waits = self._table.state == RequestState.PENDING, self._table.expires_at > now
        statement = select(func.count()).select_from(self._table).where(*waits)
        if address is not None:
            statement = statement.where(self._table.address == address)
        return self._session.scalar(statement) or 0

    def by_device_code(self, device_code: str, lock: bool) -> R | None:
        """Returns the request of a device code. lock: for a poll, so that of two at once one gets the token."""
        statement = select(self._table).where(self._table.device_code_digest == token_digest(device_code))
        return self._session.scalar(statement.with_for_update() if lock else statement)

    def by_user_code(self, stored: str, lock: bool) -> R | None:
        """Returns the request of a user code, as its column stores it. lock: for a person who decides."""
        statement = select(self._table).where(self._user_code == stored)
        return self._session.scalar(statement.with_for_update() if lock else statement)

    def forget(self, before: datetime) -> None:
        """Removes requests that had expired by then."""
        self._session.execute(delete(self._table).where(self._table.expires_at < before))


@dataclass(frozen=True)
class RequestCodes:
    """The codes of a new request, which are shown only here. expires_in, interval: seconds."""

    device_code: str
    user_code: str
    expires_in: int
    interval: int

    def response(self, page: str) -> Response:
        """Returns the response to the client (RFC 8628, 3.2). page: address at which a person enters the user code."""
        answer = DeviceAuthorization(
            device_code=self.device_code,
            user_code=self.user_code,
            verification_uri=page,
            verification_uri_complete=f"{page}?user_code={quote(self.user_code)}",
            expires_in=self.expires_in,
            interval=self.interval,
        )
        return JSONResponse(answer.model_dump(mode="json"), headers=NO_STORE)


def new_user_code() -> str:
    """Returns a code without its dash."""
    return "".join(secrets.choice(ALPHABET) for _ in range(LENGTH))


def format_user_code(code: str) -> str:
    """Returns a code as people read it: WDJB-MJHT."""
    return f"{code[:4]}-{code[4:]}"


def read_user_code(text: str) -> str | None:
    """Returns the code that a person typed, without its dash; None if the text is no code."""
    code = re.sub(r"[\s-]", "", text[:40]).upper().translate(_LOOKS_LIKE)
    return code if _CODE.fullmatch(code) else None


def described_form(*required: str, **others: str) -> dict[str, Any]:
    """Returns a form's description for OpenAPI. others: optional fields with their descriptions."""
    properties = {name: {"type": "string"} for name in required}
    properties |= {name: {"type": "string", "description": text} for name, text in others.items()}
    schema = {"type": "object", "required": list(required), "properties": properties}
    return {"requestBody": {"required": True, "content": {FORM: {"schema": schema}}}}


async def read_fields(request: Request) -> dict[str, str]:
    """Returns the fields of a form, each at most once. Raises OAuthError, or TooLarge."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise OAuthError("invalid_request", f"send the fields as {FORM}")
    raw = b"".join([piece async for piece in pieces_of(request, MAX_FORM_BYTES)])
    try:
        pairs = parse_qsl(raw.decode(), keep_blank_values=True, max_num_fields=50, errors="strict")
    except ValueError as error:
        raise OAuthError("invalid_request", "the form cannot be read") from error
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise OAuthError("invalid_request", "a field is given more than once")
    return fields


def required(fields: Mapping[str, str], name: str, most: int) -> str:
    """Returns a field of 1 to `most` characters. Raises OAuthError."""
    value = fields.get(name, "")
    if not 0 < len(value) <= most or "\0" in value:
        raise OAuthError("invalid_request", f"{name} must be given, in at most {most} characters")
    return value


async def read_poll(request: Request) -> tuple[str, str]:
    """Returns the client id and the device code of a question (RFC 8628, 3.4). Raises OAuthError, or TooLarge."""
    fields = await read_fields(request)
    if required(fields, "grant_type", 100) != GRANT_TYPE:
        raise OAuthError("unsupported_grant_type", f"only {GRANT_TYPE} is granted here")
    return required(fields, "client_id", 100), required(fields, "device_code", 200)


def refusal(error: OAuthError) -> Response:
    """Returns the response to a request that is refused."""
    headers = NO_STORE | ({"Retry-After": "60"} if error.http_status == 429 else {})
    return JSONResponse({"error": error.error, "error_description": error.detail}, error.http_status, headers)
