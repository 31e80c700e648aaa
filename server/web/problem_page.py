"""Generates docs/problems.md: all problem codes of the API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from server.web.middleware import MethodNotAllowed
from server.web.openapi import PROBLEM_JSON
from shared.errors import PROBLEM_TYPE, MobizoError

HEAD = f"""# Problem codes

<!-- mobizo-server openapi --problems > docs/problems.md -->

Every error response is `{PROBLEM_JSON}` (RFC 9457). `code` is stable and intended for programs; `type` is
`{PROBLEM_TYPE}` followed by the code; `detail` is intended for people and states the remedy.
[openapi.json](openapi.json) lists the codes of each route.

| code | status | meaning |
|---|---|---|
"""


def _classes(root: type[MobizoError]) -> Iterator[type[MobizoError]]:
    yield root
    for child in root.__subclasses__():
        # A process may hold the agent's errors, too, which have some of the same codes.
        if child.__module__.startswith(("shared.", "server.")):
            yield from _classes(child)


def _codes(document: dict[str, Any]) -> set[str]:
    codes = {MethodNotAllowed.code}
    for operations in document["paths"].values():
        for operation in operations.values():
            for response in operation["responses"].values():
                content = response.get("content", {}).get(PROBLEM_JSON)
                codes |= set(content["schema"]["properties"]["code"]["enum"] if content else ())
    return codes


def problem_page(document: dict[str, Any]) -> str:
    """Returns the page in Markdown."""
    codes = _codes(document)
    rows = sorted((error.status, error.code, (error.__doc__ or "").splitlines()[0]) for error in _classes(MobizoError))
    return HEAD + "".join(f"| `{code}` | {status} | {text} |\n" for status, code, text in rows if code in codes)
