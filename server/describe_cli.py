"""`mobizo-server openapi`: prints the API's description. Needs no home and starts no server."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def openapi(
    problems: Annotated[
        bool, typer.Option("--problems", help="the table of problem codes instead, in Markdown")
    ] = False,
) -> None:
    """Print the API's OpenAPI document, or its problem codes."""
    from server.app import create_api
    from server.http.openapi import text_of
    from server.http.problem_page import problem_page

    document = create_api().openapi()
    sys.stdout.write(problem_page(document) if problems else text_of(document))
