"""The table of the collector: one row, which is its lock, too."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Moment, Table

THE_ONE = 1


class Collection(Table):
    """The latest pass of the collector of unnamed files. The row is there from the first migration on.

    A transaction that names files holds it shared, one that removes files holds it alone.
    """

    __tablename__ = "collections"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    started_at: Mapped[datetime | None] = mapped_column(Moment)
    ended_at: Mapped[datetime | None] = mapped_column(Moment)
    deleted: Mapped[int] = mapped_column(BigInteger)
    freed_bytes: Mapped[int] = mapped_column(BigInteger)
