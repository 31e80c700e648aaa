"""One page of a table, newest first. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy import Select
from sqlalchemy.orm import Session

from server.db.columns import Numbered

Row = TypeVar("Row", bound=Numbered)


@dataclass(frozen=True)
class PageRequest:
    """At most `limit` rows, older than number `before`."""

    before: int | None
    limit: int


@dataclass(frozen=True)
class PageRows(Generic[Row]):
    """Rows of one page, and the number that the next page comes before (None: this was the last)."""

    rows: Sequence[Row]
    before: int | None


def page_of(session: Session, statement: Select[Row], table: type[Row], request: PageRequest) -> PageRows[Row]:
    """The rows of `statement`, a selection from `table`, that `request` asks for."""
    if request.before is not None:
        statement = statement.where(table.number < request.before)
    rows = session.scalars(statement.order_by(table.number.desc()).limit(request.limit + 1)).all()
    more = len(rows) > request.limit
    return PageRows(rows[: request.limit], rows[request.limit - 1].number if more else None)
