"""Pages of the Hub API: a list, and the URL of the next page in the Link header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote, urlencode

from fastapi import Depends, Query, Request, Response

from server.database.paging import PageRequest
from server.web.openapi import may_raise
from server.web.pages import InvalidCursor, list_binding, read_cursor, write_cursor
from server.web.state import State

MOST = 1000  # on a page


@dataclass(frozen=True)
class LinkPages:
    """The page that a request selects."""

    address: str  # of the list, as the client reaches it
    query: tuple[tuple[str, str], ...]
    binding: bytes
    at: int | None  # where the page begins: a row's number, or a place in a list
    limit: int

    @property
    def request(self) -> PageRequest:
        """The page as a request to the database."""
        return PageRequest(self.at, self.limit)

    def span(self, length: int) -> tuple[int, int]:
        """Returns (first, end) of the page in a list, end exclusive."""
        first = min(self.at or 0, length)
        return first, min(first + self.limit, length)

    def tell_next(self, response: Response, at: int | None) -> None:
        """Sets the Link header. at: where the next page begins; None: this is the last page."""
        if at is not None:
            query = urlencode([*self.query, ("cursor", write_cursor(at, self.binding))])
            response.headers["Link"] = f'<{self.address}?{query}>; rel="next"'


@may_raise(InvalidCursor)
def link_pages(
    request: Request,
    state: State,
    cursor: Annotated[str | None, Query(max_length=100, description="as the Link header says")] = None,
    limit: Annotated[int, Query(ge=1, description=f"most items on a page; {MOST} in any case")] = MOST,
) -> LinkPages:
    """Returns the selected page. Raises InvalidCursor."""
    binding = list_binding(request)
    base = (state.settings.public_url or str(request.base_url)).rstrip("/")
    return LinkPages(
        address=base + quote(request.url.path),
        query=tuple(pair for pair in request.query_params.multi_items() if pair[0] != "cursor"),
        binding=binding,
        at=None if cursor is None else read_cursor(cursor, binding),
        limit=min(limit, MOST),
    )


Paging = Annotated[LinkPages, Depends(link_pages)]
