"""Opaque cursors, by which clients request the next page of a list. A cursor is valid for one list and its filters."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, TypeVar

from fastapi import Depends, Query, Request

from server.database.paging import PageRequest
from server.web.openapi import may_raise
from shared.errors import BadRequest
from shared.protocol import Page

Item = TypeVar("Item")
_NUMBER_BYTES, _BINDING_BYTES = 8, 7
_CURSOR = re.compile(r"[A-Za-z0-9_-]{20}")  # base64 of those 15 bytes, so that there is one way to write each
_MAX_NUMBER = 2**63 - 1


class InvalidCursor(BadRequest):
    """The cursor is not one that this list gave, or its filters are others; begin without it."""


def write_cursor(before: int, binding: bytes) -> str:
    """Returns the cursor of the page of a list that begins before a number."""
    return base64.urlsafe_b64encode(before.to_bytes(_NUMBER_BYTES, "big") + binding).decode()


def read_cursor(cursor: str, binding: bytes) -> int:
    """Returns the number in a cursor. Raises InvalidCursor if the cursor is of another list.

    The binding catches mistakes and is no secret: a list shows only what its reader may see, wherever it begins.
    """
    if not _CURSOR.fullmatch(cursor):
        raise InvalidCursor
    data = base64.urlsafe_b64decode(cursor)
    before = int.from_bytes(data[:_NUMBER_BYTES], "big")
    if data[_NUMBER_BYTES:] != binding or before > _MAX_NUMBER:
        raise InvalidCursor
    return before


@dataclass(frozen=True)
class Pages(PageRequest):
    """One requested page of the list that `binding` identifies."""

    binding: bytes

    def page(self, items: list[Item], before: int | None) -> Page[Item]:
        """Returns the page as the API shows it. before: of `PageRows`."""
        return Page(items=items, next=None if before is None else write_cursor(before, self.binding))


def list_binding(request: Request) -> bytes:
    """Returns a digest of the requested list and its filters."""
    filters = sorted(pair for pair in request.query_params.multi_items() if pair[0] not in ("cursor", "limit"))
    return sha256(repr((request.url.path, filters)).encode()).digest()[:_BINDING_BYTES]


@may_raise(InvalidCursor)
def pages(
    request: Request,
    cursor: Annotated[str | None, Query(max_length=100, description="`next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=200, description="most items")] = 50,
) -> Pages:
    """Returns the requested page. Raises InvalidCursor."""
    binding = list_binding(request)
    return Pages(None if cursor is None else read_cursor(cursor, binding), limit, binding)


Paging = Annotated[Pages, Depends(pages)]
