"""Routes by which a program asks for a token and a person confirms its code (RFC 8628)."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response
from fastapi.responses import JSONResponse

from server.database.columns import utc_now
from server.identity.access_rules import PUBLIC, needs
from server.identity.logins.service import LoginService
from server.identity.oauth import (
    NO_STORE,
    OAUTH,
    OAuthError,
    RequestCodes,
    described_form,
    read_fields,
    read_poll,
    refusal,
    required,
)
from server.identity.tokens import Principal
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import AppState, Reading, State, Writing, address_of, place_of
from shared.access import LoginApproval, LoginRequestView, LoginToken, Scope, TokenGrant
from shared.errors import Conflict
from shared.protocol import DeviceAuthorization

PAGE = "/ui/activate"  # of the dashboard
MAX_NAME = 96  # characters

router = Routes(prefix="/v1", tags=["access"])
Maker = Annotated[Principal, needs(Scope.TOKENS_WRITE)]
UserCode = Annotated[str, Path(max_length=40, description="as the program shows it, such as WDJB-MJHT")]


@router.post(
    "/oauth/login_authorization",
    dependencies=[PUBLIC],
    response_model=DeviceAuthorization,
    responses=OAUTH,
    openapi_extra=described_form(
        "client_id", "client_name", scope="scopes, separated by spaces; without it, all of the person who confirms"
    ),
)
async def ask(request: Request, state: State) -> Response:
    """A program without a token asks for codes for itself and for a person (RFC 8628, 3.1). Errors are OAuth's."""
    try:
        fields = await read_fields(request)
        client_id, name = required(fields, "client_id", 100), required(fields, "client_name", MAX_NAME)
        if not name.isprintable():
            raise OAuthError("invalid_request", "client_name must not contain control characters")
        scopes = _scopes(fields.get("scope", ""))
        codes = await state.write_queue.run(_ask, state, client_id, name, scopes, place_of(address_of(request)))
    except OAuthError as error:
        return refusal(error)
    return codes.response((state.settings.public_url or str(request.base_url)).rstrip("/") + PAGE)


def _scopes(text: str) -> frozenset[Scope]:
    try:
        return frozenset(Scope(word) for word in text.split())
    except ValueError as error:
        raise OAuthError("invalid_scope", f"the scopes are: {', '.join(sorted(Scope))}") from error


def _ask(state: AppState, client_id: str, name: str, scopes: frozenset[Scope], address: str) -> RequestCodes:
    with state.database.writing() as session:
        return LoginService(session).ask(client_id, name, scopes, address)


@router.post(
    "/oauth/login_token",
    dependencies=[PUBLIC],
    response_model=LoginToken,
    responses=OAUTH,
    openapi_extra=described_form("grant_type", "client_id", "device_code"),
)
async def token(request: Request, state: State) -> Response:
    """A program asks whether its code was confirmed, and gets its token once (RFC 8628, 3.4). Errors are OAuth's."""
    try:
        client_id, device_code = await read_poll(request)
        outcome = await state.write_queue.run(_poll, state, client_id, device_code)
    except OAuthError as error:
        return refusal(error)
    if isinstance(outcome, OAuthError):
        return refusal(outcome)
    ends = outcome.view.expires_at
    answer = LoginToken(
        access_token=outcome.token,
        expires_in=None if ends is None else int((ends - utc_now()).total_seconds()),
        scope=" ".join(outcome.view.scopes),
    )
    return JSONResponse(answer.model_dump(mode="json", exclude_none=True), headers=NO_STORE)


def _poll(state: AppState, client_id: str, device_code: str) -> TokenGrant | OAuthError:
    with state.database.writing() as session:
        return LoginService(session).poll(client_id, device_code)


@router.get("/login-requests/{user_code}")
def show(principal: Maker, user_code: UserCode, state: State, session: Reading) -> LoginRequestView:
    """The login that waits with a code, and the scopes that confirming it would grant."""
    return LoginService(session).find(principal, user_code)


@router.post("/login-requests/{user_code}/approve", responses=raises(Conflict))
def approve(
    principal: Maker, user_code: UserCode, state: State, session: Writing, approval: LoginApproval | None = None
) -> LoginRequestView:
    """Grants the login a token with at most the caller's scopes. Repeating the request changes nothing."""
    scopes = None if approval is None else approval.scopes
    return LoginService(session).decide(principal, user_code, approved=True, scopes=scopes)


@router.post("/login-requests/{user_code}/deny", responses=raises(Conflict))
def deny(principal: Maker, user_code: UserCode, state: State, session: Writing) -> LoginRequestView:
    """Refuses the login. Repeating the request changes nothing."""
    return LoginService(session).decide(principal, user_code, approved=False)
