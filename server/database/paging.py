"""Reads one page of a table, newest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy import ColumnExpressionArgument, select
from sqlalchemy.orm import Session
from sqlalchemy.sql.base import ExecutableOption

from server.database.columns import MAX_INTEGER, Numbered

Row = TypeVar("Row", bound=Numbered)
Condition = ColumnExpressionArgument[bool]  # of a WHERE clause


@dataclass(frozen=True)
class PageRequest:
    """At most `limit` rows, older than number `before`."""

    before: int | None
    limit: int


@dataclass(frozen=True)
class PageRows(Generic[Row]):
    """Rows of one page, and `before` of the next page; None: this is the last page."""

    rows: Sequence[Row]
    before: int | None


def page_of(
    session: Session,
    table: type[Row],
    request: PageRequest,
    *conditions: Condition,
    load: Iterable[ExecutableOption] = (),
) -> PageRows[Row]:
    """Returns the requested page of the rows of `table` that meet all conditions. load: how related rows are loaded.

    It first reads the numbers, from an index alone, and then the rows by number, so that rows outside the page are not
    read.
    """
    numbers = select(table.number).where(*conditions).order_by(table.number.desc()).limit(request.limit + 1)
    if request.before is not None:
        numbers = numbers.where(table.number < min(request.before, MAX_INTEGER))
    following = session.scalars(numbers).all()
    page = following[: request.limit]
    rows = session.scalars(select(table).where(table.number.in_(page)).options(*load)).all() if page else []
    more = len(following) > request.limit
    return PageRows(sorted(rows, key=lambda row: -row.number), page[-1] if more else None)
