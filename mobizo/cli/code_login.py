"""Logging in by a code that a person who is signed in to the dashboard confirms (RFC 8628)."""

from __future__ import annotations

import getpass
import os
import platform
import sys
import webbrowser

from pydantic import ValidationError

from mobizo.cli.console import err, stop
from shared.access import LoginToken, Scope
from shared.device_flow import DeviceFlowError, run_device_flow
from shared.errors import MobizoError, NotFound
from shared.protocol import DeviceAuthorization
from shared.transport import Transport

CLIENT_ID = "mobizo"
PATHS = "/v1/oauth/login_authorization", "/v1/oauth/login_token"
MAX_NAME_LENGTH = 96  # characters of a program's name
ALTERNATIVE_LOGIN = "with a token: `mobizo login --with-token`"
# A browser window can open if one of these variables is set.
BROWSER_VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
NEXT_STEPS = {
    "access_denied": "the login was refused on the dashboard",
    "expired_token": "nobody confirmed the code in time: run `mobizo login` again",
}


def token_by_code(url: str, scopes: frozenset[Scope], browser: bool) -> str:
    """Returns a token that a signed-in person granted. Ends the command with status 1 if there is none.

    url: of the server. scopes: to request; empty: all scopes of the person. browser: open the page in a browser.
    """

    def show(authorization: DeviceAuthorization) -> None:
        # Standard output is reserved for the result.
        err.print(f"Open    {authorization.verification_uri}", markup=False, soft_wrap=True)
        err.print(f"Confirm {authorization.user_code}", markup=False, soft_wrap=True)
        if browser:
            _open_browser(authorization.verification_uri_complete or authorization.verification_uri)
        minutes = max(1, authorization.expires_in // 60)
        err.print(f"Waiting for up to {minutes} minutes. Without a browser, log in {ALTERNATIVE_LOGIN}", soft_wrap=True)

    fields = {"client_id": CLIENT_ID, "client_name": client_name(), "scope": " ".join(sorted(scopes))}
    try:
        with Transport(url) as transport:
            return LoginToken.model_validate(run_device_flow(transport, *PATHS, fields, show)).access_token
    except DeviceFlowError as error:
        raise stop(NEXT_STEPS.get(error.error, error.detail), 1) from error
    except NotFound as error:
        raise stop(f"{url} has no login by code; log in {ALTERNATIVE_LOGIN}", 1) from error
    except MobizoError as error:
        raise stop(f"{error.detail}; check the address with `mobizo config`", 1) from error
    except ValidationError as error:
        raise stop(f"{url} does not respond like a mobizo server of this version; check the address", 1) from error


def client_name() -> str:
    """Returns the name that the person who confirms sees: this program, the user and the machine."""
    try:
        user = f"{getpass.getuser()}@"
    except (KeyError, OSError):  # a container whose user has no name
        user = ""
    name = f"mobizo of {user}{platform.node() or 'unknown host'}"
    return "".join(letter for letter in name if letter.isprintable())[:MAX_NAME_LENGTH]


def _open_browser(address: str) -> None:
    """Opens a page, if this machine has a browser with a window. A text browser would take over the terminal."""
    if sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in BROWSER_VARIABLES):
        webbrowser.open(address)
