"""The tables of the queue: lanes of jobs that ask for the same of a device, and the turns of those who wait."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Numbered, Table


class Lane(Numbered, Table):
    """A line of ready jobs of one tenant that any of the same devices may take; never changed once it is there.

    What is asked of a device is thus looked at once a lane and not once a job, and a lane's first job is one look into
    an index. key: a digest of everything else. needs: a `Needs` as JSON.
    """

    __tablename__ = "lanes"
    __table_args__ = (Index("ix_lanes_dataset", "tenant", "dataset", "only_device_id"),)

    key: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(96))
    dataset: Mapped[str] = mapped_column(String(96))
    only_device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    recipe_id: Mapped[str] = mapped_column(ForeignKey("programs.recipe_id"))
    priority: Mapped[int] = mapped_column()
    needs: Mapped[str] = mapped_column(Text)


class Turn(Table):
    """The turn that a user's latest job was given; user `""` holds the latest turn of the tenant that a device took."""

    __tablename__ = "turns"

    tenant: Mapped[str] = mapped_column(String(96), primary_key=True)
    user: Mapped[str] = mapped_column(String(96), primary_key=True)
    turn: Mapped[int] = mapped_column()
