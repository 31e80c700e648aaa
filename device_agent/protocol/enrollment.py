"""Enrollment by a code that an operator approves: the device's side of the OAuth device flow (RFC 8628)."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from shared.errors import Forbidden, MobizoError, Unauthorized, Unavailable
from shared.protocol import DeviceAuthorization, DeviceGrant, DeviceToken
from shared.transport import Transport

CLIENT_ID = "mobizo-agent"
GRANT_TYPE = "urn:ietf:params:oauth:grant-type:device_code"
SLOWER_SECONDS = 5.0  # added to the interval by `slow_down` (RFC 8628, 3.5)
SHORTEST_SECONDS = 1.0  # between two polls, even if the server allows less

Document = TypeVar("Document", bound=BaseModel)


class EnrollmentRefused(Forbidden):
    """The operator refused this device."""

    code, title = "join-refused", "Refused"


class EnrollmentExpired(Unauthorized):
    """No operator approved this device in time; run `mobizo-agent enroll` again."""

    code, title = "join-late", "Not approved in time"


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
    unreachable. Raises EnrollmentRefused, EnrollmentExpired, or the server's error.
    """
    fields = {
        "client_id": CLIENT_ID,
        "device_name": name,
        "public_key": public_key,
        "platform": platform.platform()[:200],
    }
    status, document = transport.form("/v1/oauth/device_authorization", fields)
    if status >= 400:
        raise _refusal(document)
    authorization = _read(DeviceAuthorization, document)
    show(authorization)
    deadline, interval = now() + authorization.expires_in, max(float(authorization.interval), SHORTEST_SECONDS)
    poll = {"grant_type": GRANT_TYPE, "device_code": authorization.device_code, "client_id": CLIENT_ID}
    pause = interval
    while now() + pause < deadline:
        wait(pause)
        try:
            status, document = transport.form("/v1/oauth/token", poll)
        except Unavailable:
            pause = min(pause * 2, 60.0)
            continue
        if status < 400:
            issued = _read(DeviceToken, document)
            return DeviceGrant(device_id=issued.device_id, token=issued.access_token, server=issued.server)
        if document["error"] == "slow_down":
            interval += SLOWER_SECONDS
        elif document["error"] != "authorization_pending":
            raise _refusal(document)
        pause = interval
    raise EnrollmentExpired


def _refusal(document: dict[str, Any]) -> MobizoError:
    error, detail = document["error"], str(document.get("error_description") or document["error"])
    if error == "access_denied":
        return EnrollmentRefused()
    if error == "expired_token":
        return EnrollmentExpired()
    return MobizoError(f"the server refuses to enroll this device: {detail}")


def _read(model: type[Document], document: dict[str, Any]) -> Document:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise MobizoError(f"the server's response is not a {model.__name__}; it may be of another version") from error
