"""The client's side of the OAuth device flow (RFC 8628): asking for codes, and polling until a person has decided."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from shared.errors import MobizoError, Unavailable
from shared.protocol import GRANT_TYPE, DeviceAuthorization
from shared.transport import Transport

SLOWER_SECONDS = 5.0  # added to the interval by `slow_down` (RFC 8628, 3.5)
SHORTEST_SECONDS = 1.0  # between two polls, even if the server allows less
LONGEST_SECONDS = 60.0  # between two polls while the server is unreachable


class DeviceFlowError(MobizoError):
    """The server refused a request of the device flow."""

    code, title = "oauth", "OAuth error"

    def __init__(self, detail: str | None = None, error: str = "invalid_request") -> None:
        """error: of RFC 6749 or RFC 8628."""
        super().__init__(detail)
        self.error = error


def run_device_flow(
    transport: Transport,
    authorization_path: str,
    token_path: str,
    fields: Mapping[str, str],
    show: Callable[[DeviceAuthorization], None],
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Asks for codes and polls at the server's interval; returns the JSON object that contains the token.

    fields: of the request, with `client_id`. show: called once with the codes. Polls with increasing delays while the
    server is unreachable. Raises DeviceFlowError, also with `expired_token` when the codes expire, or the server's
    error.
    """
    status, document = transport.form(authorization_path, dict(fields))
    if status >= 400:
        raise _refusal(document)
    try:
        authorization = DeviceAuthorization.model_validate(document)
    except ValidationError as error:
        raise MobizoError("the server's response is not a DeviceAuthorization; it may be of another version") from error
    show(authorization)
    deadline, interval = now() + authorization.expires_in, max(float(authorization.interval), SHORTEST_SECONDS)
    token_request = {
        "grant_type": GRANT_TYPE,
        "device_code": authorization.device_code,
        "client_id": fields["client_id"],
    }
    delay = interval
    while now() + delay < deadline:
        wait(delay)
        try:
            status, document = transport.form(token_path, token_request)
        except Unavailable:
            delay = min(delay * 2, LONGEST_SECONDS)
            continue
        if status < 400:
            return document
        if document["error"] == "slow_down":
            interval += SLOWER_SECONDS
        elif document["error"] != "authorization_pending":
            raise _refusal(document)
        delay = interval
    raise DeviceFlowError("nobody approved the request in time; ask again", "expired_token")


def _refusal(document: dict[str, Any]) -> DeviceFlowError:
    error = str(document["error"])
    return DeviceFlowError(str(document.get("error_description") or error), error)
