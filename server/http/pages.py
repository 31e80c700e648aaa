"""Opaque cursors: how a client asks for the page after the one it has."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from fastapi import Depends, Query

from server.db.paging import PageRequest
from shared.errors import BadRequest

_MAX_NUMBER = 2**63 - 1


def write_cursor(before: int | None) -> str | None:
    """The cursor of the page that comes before a number."""
    return None if before is None else base64.urlsafe_b64encode(str(before).encode()).decode()


def read_cursor(cursor: str) -> int:
    """The number in a cursor. Raises BadRequest if it is none of ours."""
    try:
        before = int(base64.urlsafe_b64decode(cursor.encode()))
    except (ValueError, binascii.Error):
        before = -1
    if not 0 <= before <= _MAX_NUMBER:
        raise BadRequest("the cursor is not one that this server gave; begin without it")
    return before


def _page_request(
    cursor: Annotated[str | None, Query(max_length=100, description="`next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=200, description="most items")] = 50,
) -> PageRequest:
    return PageRequest(None if cursor is None else read_cursor(cursor), limit)


Paging = Annotated[PageRequest, Depends(_page_request)]
