"""The table of garbage collection: one row, which also serves as its lock."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Moment, Table

THE_ONE = 1


class GarbageCollection(Table):
    """The latest pass of garbage collection. The first migration inserts the row.

    Transactions that reference files lock it in shared mode; a transaction that removes files locks it exclusively.
    """

    __tablename__ = "collections"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    started_at: Mapped[datetime | None] = mapped_column(Moment)
    ended_at: Mapped[datetime | None] = mapped_column(Moment)
    deleted: Mapped[int] = mapped_column(BigInteger)
    freed_bytes: Mapped[int] = mapped_column(BigInteger)
