"""`mobizo-server openapi`: prints the description of the REST API without a home or a running server."""

from __future__ import annotations

import sys


def openapi() -> None:
    """Print the API's OpenAPI document."""
    from server.app import create_api
    from server.web.openapi import text_of

    sys.stdout.write(text_of(create_api().openapi()))
