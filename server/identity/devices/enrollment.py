"""Routes by which a device asks to join and an operator lets it in (RFC 8628), and the page that tells a person how."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Annotated

from fastapi import Path, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import ValidationError

from server.identity.access_rules import PUBLIC, needs
from server.identity.devices.authorization import AuthorizationService
from server.identity.oauth import (
    NO_STORE,
    OAUTH,
    OAuthError,
    RequestCodes,
    described_form,
    format_user_code,
    read_fields,
    read_poll,
    read_user_code,
    refusal,
    required,
)
from server.identity.signing_keys.service import KeyService, server_info
from server.identity.tokens import Principal
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import AppState, Reading, State, Writing, place_of
from shared.access import Scope
from shared.errors import BadRequest, Conflict
from shared.invalid_fields import first_invalid
from shared.protocol import DeviceApproval, DeviceAuthorization, DeviceEnrollment, DeviceRequestView, DeviceToken

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

router = Routes(tags=["devices"])
UserCode = Annotated[str, Path(max_length=40, description="as the device shows it, such as WDJB-MJHT")]


@router.post(
    "/v1/oauth/device_authorization",
    dependencies=[PUBLIC],
    response_model=DeviceAuthorization,
    responses=OAUTH,
    openapi_extra=described_form("client_id", "device_name", "public_key", "platform"),
)
async def ask(request: Request, state: State) -> Response:
    """A device asks to join: codes for it and for a person (RFC 8628, 3.1). Errors are OAuth's."""
    try:
        fields = await read_fields(request)
        client_id = required(fields, "client_id", 100)
        device = _device(fields)
        address = place_of(request.client.host if request.client else "")
        codes = await state.write_queue.run(_ask, state, client_id, device, address)
    except OAuthError as error:
        return refusal(error)
    except BadRequest as error:
        return refusal(OAuthError("invalid_request", error.detail))
    return codes.response(_page_address(request, state))


def _device(fields: Mapping[str, str]) -> DeviceEnrollment:
    try:
        return DeviceEnrollment(
            name=required(fields, "device_name", 96),
            public_key=required(fields, "public_key", 100),
            platform=required(fields, "platform", 200),
        )
    except ValidationError as error:
        raise OAuthError("invalid_request", f"device_name: {first_invalid(error).message}") from error


def _ask(state: AppState, client_id: str, device: DeviceEnrollment, address: str) -> RequestCodes:
    with state.database.writing() as session:
        return AuthorizationService(session).ask(client_id, device, address)


def _page_address(request: Request, state: AppState) -> str:
    return f"{state.settings.public_url or str(request.base_url)}".rstrip("/") + "/device"


@router.post(
    "/v1/oauth/token",
    dependencies=[PUBLIC],
    response_model=DeviceToken,
    responses=OAUTH,
    openapi_extra=described_form("grant_type", "client_id", "device_code"),
)
async def token(request: Request, state: State) -> Response:
    """A device polls for approval of its enrollment, at most once per interval (RFC 8628, 3.4). Errors are OAuth's."""
    try:
        client_id, device_code = await read_poll(request)
        answer = await state.write_queue.run(_poll, state, client_id, device_code)
    except OAuthError as error:
        return refusal(error)
    return JSONResponse(answer.model_dump(mode="json"), headers=NO_STORE)


def _poll(state: AppState, client_id: str, device_code: str) -> DeviceToken:
    with state.database.writing() as session:
        enrolled = AuthorizationService(session).poll(client_id, device_code)
        server = server_info(KeyService(session, state.settings).public())
    if isinstance(enrolled, OAuthError):
        raise enrolled
    device, text = enrolled
    return DeviceToken(access_token=text, device_id=device.id, server=server)


@router.get("/v1/device-requests/{user_code}")
def show(
    principal: Annotated[Principal, needs(Scope.DEVICES_READ)], user_code: UserCode, state: State, session: Reading
) -> DeviceRequestView:
    """The device that shows a code, for an operator to compare before letting it in."""
    return AuthorizationService(session).find(principal.tenant, user_code)


@router.post("/v1/device-requests/{user_code}/approve", responses=raises(Conflict))
def approve(
    principal: Annotated[Principal, needs(Scope.DEVICES_WRITE)],
    user_code: UserCode,
    state: State,
    session: Writing,
    approval: DeviceApproval | None = None,
) -> DeviceRequestView:
    """Admits the device to the operator's tenant, bound to the given users. Repeating the request changes nothing."""
    users = () if approval is None else approval.users
    return AuthorizationService(session).decide(principal, user_code, approved=True, users=users)


@router.post("/v1/device-requests/{user_code}/deny", responses=raises(Conflict))
def deny(
    principal: Annotated[Principal, needs(Scope.DEVICES_WRITE)], user_code: UserCode, state: State, session: Writing
) -> DeviceRequestView:
    """Refuses the device. Saying it twice is fine."""
    return AuthorizationService(session).decide(principal, user_code, approved=False)


@router.get("/device", dependencies=[PUBLIC], response_class=HTMLResponse)
async def page(request: Request, state: State, user_code: Annotated[str, Query(max_length=100)] = "") -> HTMLResponse:
    """Explains to a person whom a device sent here what to do. Does not reveal whether a code is known."""
    code = read_user_code(user_code)
    name = format_user_code(code) if code is not None else "CODE"
    server = _page_address(request, state).removesuffix("/device")
    answer = (
        f"<p>The device shows the code <strong>{html.escape(name)}</strong>.</p>"
        if code is not None
        else f"<p>{html.escape(user_code)!s} is no such code.</p>"
        if user_code
        else ""
    )
    command = f"mobizo device approve {name} --server {server}"
    content = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Let a device in</title></head><body>'
        f"<h1>A device asks to join</h1>{answer}"
        "<p>Only an operator can let it in, by this command, with an operator's token in MOBIZO_TOKEN:</p>"
        f"<pre>{html.escape(command)}</pre>"
        f'<p>or on the <a href="/ui/devices/join?user_code={name}">dashboard</a> of this server.</p>'
        "<p>It shows the device's name and the fingerprint of its key. Compare them with what the device shows, and "
        "approve only a device that you have before you, or whose owner you speak to.</p></body></html>"
    )
    return HTMLResponse(content, headers=PAGE_HEADERS)
