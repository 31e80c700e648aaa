"""Enrollment by a code that an operator approves: the device's side of the OAuth device flow (RFC 8628)."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

from pydantic import ValidationError

from shared.device_flow import DeviceFlowError, run_device_flow
from shared.errors import Forbidden, MobizoError, Unauthorized
from shared.protocol import DeviceAuthorization, DeviceGrant, DeviceToken
from shared.transport import Transport

CLIENT_ID = "mobizo-agent"


def request_enrollment(
    transport: Transport,
    name: str,
    public_key: str,
    show: Callable[[DeviceAuthorization], None],
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> DeviceGrant:
    """Requests enrollment and polls at the server's interval until an operator approves it; returns the grant.

    public_key: this device's, base64. show: called once with the codes. Retries with increasing delays if the server is
    unreachable. Raises Forbidden if the operator refuses this device, Unauthorized if nobody approves it in time, or
    the server's error.
    """
    fields = {
        "client_id": CLIENT_ID,
        "device_name": name,
        "public_key": public_key,
        "platform": platform.platform()[:200],
    }
    paths = "/v1/oauth/device_authorization", "/v1/oauth/token"
    try:
        document = run_device_flow(transport, *paths, fields, show, wait, now)
    except DeviceFlowError as error:
        raise _refusal(error) from error
    try:
        issued = DeviceToken.model_validate(document)
    except ValidationError as error:
        raise MobizoError("the server's response is not a DeviceToken; it may be of another version") from error
    return DeviceGrant(device_id=issued.device_id, token=issued.access_token, server=issued.server)


def _refusal(error: DeviceFlowError) -> MobizoError:
    if error.error == "access_denied":
        return Forbidden("the operator refused this device")
    if error.error == "expired_token":
        return Unauthorized("no operator approved this device in time; run `mobizo-agent enroll` again")
    return MobizoError(f"the server refuses to enroll this device: {error.detail}")
