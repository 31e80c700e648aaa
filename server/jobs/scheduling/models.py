"""The tables of the job queue: lanes of jobs with equal needs, and the start tags of fair queueing."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Numbered, Table


class StoredLane(Numbered, Table):
    """A queue of ready jobs of one user that the same devices may take. Rows never change after they are inserted.

    A device is thus matched once with each lane and not once with each job, and the first job of a lane is found by one
    index lookup. key: a digest of all other columns. needs: a `Needs` as JSON.
    """

    __tablename__ = "lanes"
    __table_args__ = (Index("ix_lanes_user", "tenant", "user", "dataset", "only_device_id"),)

    key: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(96))
    user: Mapped[str] = mapped_column(String(96))
    dataset: Mapped[str] = mapped_column(String(96))
    only_device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    recipe_id: Mapped[str] = mapped_column(ForeignKey("programs.recipe_id"))
    priority: Mapped[int] = mapped_column()
    needs: Mapped[str] = mapped_column(Text)


class StartTag(Table):
    """The start tag of a user's latest job. The row of user `""` holds the tenant's virtual time."""

    __tablename__ = "start_tags"

    tenant: Mapped[str] = mapped_column(String(96), primary_key=True)
    user: Mapped[str] = mapped_column(String(96), primary_key=True)
    start_tag: Mapped[int] = mapped_column()
