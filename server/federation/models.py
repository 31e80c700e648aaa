"""The tables of cohorts, members, rounds, and each member's part in a round."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, Float, ForeignKey, Index, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column, relationship

from server.database.columns import Document, Numbered, Table, UtcTime, text_enum
from server.jobs.repository import Job
from server.storage.store import FileColumn
from shared.federation.cohort import CohortSettings, RoundState, UpdateState
from shared.federation.secure_aggregation.settings import SecureAggregationParameters
from shared.recipe import Recipe
from shared.registry import Parent
from shared.task import Task
from shared.zo.lora import BaseShape

AGGREGATE = "aggregation"  # the kind of the task; its subject is the id of the round
_CURRENT = text("left_at IS NULL")
_OPEN = text("state = 'open'")
_UNDER_WAY = text("state IN ('open', 'aggregating')")
_NEXT = text("opens AND NOT busy")


class Cohort(Numbered, Table):
    """Users of a tenant whose updates are aggregated into one adapter, which has the name of the cohort."""

    __tablename__ = "cohorts"
    __table_args__ = (
        UniqueConstraint("tenant", "name"),
        Index("ix_cohorts_tenant", "tenant", "number"),
        Index("ix_cohorts_next", "number", sqlite_where=_NEXT, postgresql_where=_NEXT),
    )

    tenant: Mapped[str] = mapped_column(String(96))
    name: Mapped[str] = mapped_column(String(96))
    settings: Mapped[CohortSettings] = mapped_column(Document(CohortSettings))
    task: Mapped[Task] = mapped_column(Document(Task))
    recipe: Mapped[Recipe] = mapped_column(Document(Recipe))
    recipe_id: Mapped[str] = mapped_column(String(64))
    shape: Mapped[BaseShape] = mapped_column(Document(BaseShape))
    a_sha256: Mapped[str] = mapped_column(String(64))
    size_d: Mapped[int] = mapped_column(BigInteger)
    rounds: Mapped[int] = mapped_column(default=0)  # rounds opened so far; round numbers are never reused
    opens: Mapped[bool] = mapped_column()  # the next round opens automatically
    busy: Mapped[bool] = mapped_column(default=False)  # a round is open or being aggregated
    created_at: Mapped[datetime] = mapped_column(UtcTime)


class CohortMember(Numbered, Table):
    """A user of a cohort and the device that trains for the user. A user who returns keeps the same row."""

    __tablename__ = "cohort_members"
    __table_args__ = (
        UniqueConstraint("cohort_number", "user"),
        Index("ix_cohort_members_cohort", "cohort_number", "number"),
        # A device trains for at most one current member.
        Index(
            "ix_cohort_members_device",
            "cohort_number",
            "device_id",
            unique=True,
            sqlite_where=_CURRENT,
            postgresql_where=_CURRENT,
        ),
        Index("ix_cohort_members_of_device", "device_id", "cohort_number"),
    )

    cohort_number: Mapped[int] = mapped_column(ForeignKey("cohorts.number"))
    user: Mapped[str] = mapped_column(String(96))
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    joined_at: Mapped[datetime] = mapped_column(UtcTime)
    left_at: Mapped[datetime | None] = mapped_column(UtcTime)


class CohortRound(Numbered, Table):
    """One round. An aggregation task (`server.tasks`) produces its version."""

    __tablename__ = "cohort_rounds"
    __table_args__ = (
        UniqueConstraint("cohort_number", "position"),
        Index("ix_cohort_rounds_cohort", "cohort_number", "number"),
        # The database enforces that at most one round of a cohort is open.
        Index("ix_cohort_rounds_open", "cohort_number", unique=True, sqlite_where=_OPEN, postgresql_where=_OPEN),
        Index("ix_cohort_rounds_state", "state", "number", sqlite_where=_UNDER_WAY, postgresql_where=_UNDER_WAY),
    )

    id: Mapped[str] = mapped_column(String(64), unique=True)
    cohort_number: Mapped[int] = mapped_column(ForeignKey("cohorts.number"))
    position: Mapped[int] = mapped_column()  # counts from 1 within the cohort
    state: Mapped[RoundState] = mapped_column(text_enum(RoundState))
    why: Mapped[str] = mapped_column(Text, default="")
    start: Mapped[Parent | None] = mapped_column(Document(Parent))  # None: B = 0
    start_sha256: Mapped[str | None] = mapped_column(String(64), index=True)
    version: Mapped[int | None] = mapped_column()
    members: Mapped[int] = mapped_column(default=0)  # members asked for an update
    updates: Mapped[int] = mapped_column(default=0)  # accepted updates
    # The server optimizer's state after this round; kept for the latest published round only.
    optimizer_sha256: Mapped[str | None] = mapped_column(String(64), index=True)
    opened_at: Mapped[datetime] = mapped_column(UtcTime)
    deadline: Mapped[datetime] = mapped_column(UtcTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcTime)

    cohort: Mapped[Cohort] = relationship()


class MemberUpdate(Numbered, Table):
    """A member's part in a round: the job that requests the update, and its outcome. One per member and round."""

    __tablename__ = "cohort_updates"
    __table_args__ = (
        UniqueConstraint("round_number", "member_number"),
        Index("ix_cohort_updates_round", "round_number", "state", "number"),
    )

    round_number: Mapped[int] = mapped_column(ForeignKey("cohort_rounds.number"))
    member_number: Mapped[int] = mapped_column(ForeignKey("cohort_members.number"), index=True)
    job_number: Mapped[int | None] = mapped_column(ForeignKey("jobs.number"), unique=True)  # None: not submitted yet
    state: Mapped[UpdateState] = mapped_column(text_enum(UpdateState))
    start_version: Mapped[int | None] = mapped_column()  # version of the cohort's adapter; None: B = 0
    start_sha256: Mapped[str | None] = mapped_column(String(64), index=True)
    sha256: Mapped[str | None] = mapped_column(String(64), index=True)  # the update's file, until the round has ended
    sent_bytes: Mapped[int | None] = mapped_column(BigInteger)
    claimed_examples: Mapped[int | None] = mapped_column(BigInteger)
    examples: Mapped[int | None] = mapped_column(BigInteger)
    norm: Mapped[float | None] = mapped_column(Float)
    staleness: Mapped[int | None] = mapped_column()
    start_accuracy: Mapped[float | None] = mapped_column(Float)
    tuned_accuracy: Mapped[float | None] = mapped_column(Float)
    updated_at: Mapped[datetime] = mapped_column(UtcTime)

    round: Mapped[CohortRound] = relationship()
    member: Mapped[CohortMember] = relationship()
    job: Mapped[Job | None] = relationship()


FILES = (
    FileColumn(MemberUpdate.sha256),
    FileColumn(MemberUpdate.start_sha256),
    FileColumn(CohortRound.start_sha256, CohortRound.ended_at.is_(None)),
    FileColumn(CohortRound.optimizer_sha256),
)


def secure_aggregation_parameters(cohort_round: CohortRound) -> SecureAggregationParameters | None:
    """Returns the parameters of a round, or None if its updates are not masked."""
    cohort = cohort_round.cohort
    settings, masking = cohort.settings, cohort.settings.masking
    if masking is None or settings.aggregator.clip_norm is None:
        return None
    return SecureAggregationParameters(
        cohort=cohort.name,
        round=cohort_round.position,
        start_sha256=cohort_round.start_sha256,
        recipe_id=cohort.recipe_id,
        size=cohort.size_d,
        clip=settings.aggregator.clip_norm,
        most_weight=settings.most_weight,
        most_members=masking.most_members,
        minimum=masking.minimum,
        threshold=masking.threshold,
        bits=masking.bits,
    )
