"""docs/problems.md: every problem code that the API may answer, from its own description."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from server.http.openapi import PROBLEM_JSON
from server.http.problems import MethodNotAllowed
from shared.errors import PROBLEM_TYPE, MobizoError

HEAD = f"""# Problem codes

<!-- mobizo-server openapi --problems > docs/problems.md -->

Whatever goes wrong is answered as `{PROBLEM_JSON}` (RFC 9457). Programs go by `code`, which is stable; `type` is
`{PROBLEM_TYPE}` and the code; `detail` is for people and says what to do. Which route may answer which code is in
[openapi.json](openapi.json).

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
    found = {MethodNotAllowed.code}
    for operations in document["paths"].values():
        for operation in operations.values():
            for response in operation["responses"].values():
                content = response.get("content", {}).get(PROBLEM_JSON)
                found |= set(content["schema"]["properties"]["code"]["enum"] if content else ())
    return found


def problem_page(document: dict[str, Any]) -> str:
    """The page, in Markdown."""
    codes = _codes(document)
    rows = sorted((error.status, error.code, (error.__doc__ or "").splitlines()[0]) for error in _classes(MobizoError))
    return HEAD + "".join(f"| `{code}` | {status} | {text} |\n" for status, code, text in rows if code in codes)
