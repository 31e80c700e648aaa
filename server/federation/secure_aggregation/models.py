"""The tables of masked rounds and their devices.

Shares and masked vectors are kept until the round has ended. Large columns are loaded on access only.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Float, ForeignKey, Index, LargeBinary, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Document, Numbered, Table, UtcTime, text_enum
from server.storage.store import FileColumn
from shared.federation.secure_aggregation.messages import Advertisement, Phase, Roster
from shared.federation.secure_aggregation.settings import SecureAggregationParameters


class SecureAggregationRound(Table):
    """A cohort's round whose updates are masked; a `SessionRow`."""

    __tablename__ = "masked_rounds"

    round_number: Mapped[int] = mapped_column(ForeignKey("cohort_rounds.number"), primary_key=True, autoincrement=False)
    parameters: Mapped[SecureAggregationParameters] = mapped_column(Document(SecureAggregationParameters))
    phase_seconds: Mapped[float] = mapped_column(Float)
    least: Mapped[int] = mapped_column()  # minimum number of devices to begin with: the cohort's quorum
    phase: Mapped[Phase] = mapped_column(text_enum(Phase))
    closes_at: Mapped[datetime | None] = mapped_column(UtcTime, index=True)
    why: Mapped[str | None] = mapped_column(Text)
    roster: Mapped[Roster | None] = mapped_column(Document(Roster), deferred=True)


class SecureAggregationMember(Numbered, Table):
    """A device in a masked round; a `MemberRow`."""

    __tablename__ = "masked_members"
    __table_args__ = (Index("ix_masked_members_round", "round_number", "member", unique=True),)

    round_number: Mapped[int] = mapped_column(ForeignKey("masked_rounds.round_number"))
    member: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), index=True)
    roster_number: Mapped[int | None] = mapped_column()  # on the roster, from 1
    last_phase: Mapped[Phase] = mapped_column(text_enum(Phase))
    advertisement: Mapped[Advertisement] = mapped_column(Document(Advertisement), deferred=True)
    sealed: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    commitment: Mapped[bytes | None] = mapped_column(LargeBinary)
    vector_sha256: Mapped[str | None] = mapped_column(String(64), index=True)
    signature: Mapped[bytes | None] = mapped_column(LargeBinary)
    seeds: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    keys: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)


FILES = (FileColumn(SecureAggregationMember.vector_sha256),)
