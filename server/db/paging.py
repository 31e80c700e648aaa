"""One page of a table, newest first. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from server.db.columns import MOST, Numbered

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
    """The rows of `statement`, a selection from `table`, that `request` asks for.

    First their numbers, which an index has alone and in order, then the rows by their numbers: rows that are not shown
    are not read, however large they are and however many lie between.
    """
    numbers = statement.with_only_columns(table.number).order_by(table.number.desc()).limit(request.limit + 1)
    if request.before is not None:
        numbers = numbers.where(table.number < min(request.before, MOST))
    found = session.scalars(numbers).all()
    shown = found[: request.limit]
    rows = session.scalars(select(table).where(table.number.in_(shown))).all() if shown else []
    more = len(found) > request.limit
    return PageRows(sorted(rows, key=lambda row: -row.number), shown[-1] if more else None)
