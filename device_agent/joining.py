"""Asking a server to let this device in, by a code that an operator approves: the device's side of RFC 8628.

Keeps nothing: what it learns, it returns. Knows no file of the agent's and no terminal.
"""

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
SLOWER_SECONDS = 5.0  # that a `slow_down` adds to the interval (RFC 8628, 3.5)
SHORTEST_SECONDS = 1.0  # between two questions, whatever the server allows

Answer = TypeVar("Answer", bound=BaseModel)


class JoinRefused(Forbidden):
    """The operator refused this device."""

    code, title = "join-refused", "Refused"


class JoinLate(Unauthorized):
    """No operator approved this device in time; run `mobizo-agent enroll` again."""

    code, title = "join-late", "Not approved in time"


def join(
    transport: Transport,
    name: str,
    public_key: str,
    show: Callable[[DeviceAuthorization], None],
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> DeviceGrant:
    """What an operator's approval gives; asks until then, at the server's pace.

    public_key: this device's, base64. show: told the codes once. A server that cannot be reached meanwhile is asked
    again, ever slower. Raises JoinRefused, JoinLate, or what the server says otherwise.
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
    asked = _read(DeviceAuthorization, document)
    show(asked)
    deadline, interval = now() + asked.expires_in, max(float(asked.interval), SHORTEST_SECONDS)
    question = {"grant_type": GRANT_TYPE, "device_code": asked.device_code, "client_id": CLIENT_ID}
    pause = interval
    while now() + pause < deadline:
        wait(pause)
        try:
            status, document = transport.form("/v1/oauth/token", question)
        except Unavailable:
            pause = min(pause * 2, 60.0)
            continue
        if status < 400:
            granted = _read(DeviceToken, document)
            return DeviceGrant(device_id=granted.device_id, token=granted.access_token, server=granted.server)
        if document["error"] == "slow_down":
            interval += SLOWER_SECONDS
        elif document["error"] != "authorization_pending":
            raise _refusal(document)
        pause = interval
    raise JoinLate


def _refusal(document: dict[str, Any]) -> MobizoError:
    error, detail = document["error"], str(document.get("error_description") or document["error"])
    if error == "access_denied":
        return JoinRefused()
    if error == "expired_token":
        return JoinLate()
    return MobizoError(f"the server does not let this device in: {detail}")


def _read(model: type[Answer], document: dict[str, Any]) -> Answer:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise MobizoError(f"the server's answer is no {model.__name__}; is it of another version?") from error
