"""`mobizo-server openapi`: prints the description of the REST API without a home or a running server."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def openapi(
    problems: Annotated[
        bool, typer.Option("--problems", help="print the table of problem codes in Markdown instead")
    ] = False,
    routes: Annotated[bool, typer.Option("--routes", help="print the table of routes in Markdown instead")] = False,
) -> None:
    """Print the API's OpenAPI document, its problem codes or its routes with their limits."""
    from server.app import create_api
    from server.web.openapi import text_of
    from server.web.problem_page import problem_page
    from server.web.route_page import route_page

    api = create_api()
    if routes:
        sys.stdout.write(route_page(api.routes))
    else:
        document = api.openapi()
        sys.stdout.write(problem_page(document) if problems else text_of(document))
