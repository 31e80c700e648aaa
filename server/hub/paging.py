"""Pages as the Hub gives them: a list, and the address of the next page in the Link header. Knows no route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote, urlencode

from fastapi import Depends, Query, Request, Response

from server.db.paging import PageRequest
from server.http.openapi import may_raise
from server.http.pages import InvalidCursor, list_binding, read_cursor, write_cursor
from server.http.place import Here

MOST = 1000  # on a page


@dataclass(frozen=True)
class LinkPages:
    """One page that a request asks for."""

    address: str  # of the list, as the client reaches it
    query: tuple[tuple[str, str], ...]
    binding: bytes
    at: int | None  # where the page begins: a row's number, or a place in a list
    limit: int

    @property
    def request(self) -> PageRequest:
        """For a table."""
        return PageRequest(self.at, self.limit)

    def span(self, length: int) -> tuple[int, int]:
        """(first, end) of the page in a list that is there already, end exclusive."""
        first = min(self.at or 0, length)
        return first, min(first + self.limit, length)

    def tell_next(self, response: Response, at: int | None) -> None:
        """Says where the next page is; at: where it begins, None: this was the last."""
        if at is not None:
            query = urlencode([*self.query, ("cursor", write_cursor(at, self.binding))])
            response.headers["Link"] = f'<{self.address}?{query}>; rel="next"'


@may_raise(InvalidCursor)
def link_pages(
    request: Request,
    here: Here,
    cursor: Annotated[str | None, Query(max_length=100, description="as the Link header says")] = None,
    limit: Annotated[int, Query(ge=1, description=f"most items on a page; {MOST} in any case")] = MOST,
) -> LinkPages:
    """The page that is asked for. Raises InvalidCursor."""
    binding = list_binding(request)
    base = (here.settings.public_url or str(request.base_url)).rstrip("/")
    return LinkPages(
        address=base + quote(request.url.path),
        query=tuple(pair for pair in request.query_params.multi_items() if pair[0] != "cursor"),
        binding=binding,
        at=None if cursor is None else read_cursor(cursor, binding),
        limit=min(limit, MOST),
    )


Paging = Annotated[LinkPages, Depends(link_pages)]
