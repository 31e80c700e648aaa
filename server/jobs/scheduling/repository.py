"""The tables and all SQL of the job queue: lanes, their first jobs, and start tags.

Jobs are ordered by start-time fair queueing (Goyal, Vin and Cheng, 1996) in which every job costs 1: if two users have
jobs waiting, their jobs alternate, however many each user has. A job's start tag is one more than the tag of the user's
previous job, and at least one more than the tenant's virtual time, which is the start tag of the latest job that a
device took. Priority comes before start tags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import ForeignKey, Index, String, Text, bindparam, case, exists, func, or_, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Numbered, Table
from server.database.database import Repository, add_if_absent, insert_or, locked, read_columns
from server.jobs.repository import Job
from server.jobs.scheduling.matching import DeviceOffer, Needs, can_run, parse_needs
from shared.canonical import canonical_json, sha256_hex

CHUNK = 500  # users in one query
VIRTUAL_TIME = ""  # the user, whose name no request can have, of the row with a tenant's virtual time


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


@dataclass(frozen=True, eq=False)
class Lane:
    """A lane with its parsed needs, as it is matched with devices."""

    number: int
    tenant: str
    user: str
    dataset: str
    only_device_id: str | None
    recipe_id: str
    priority: int
    needs: Needs

    def admits(self, offer: DeviceOffer) -> bool:
        """Returns whether a device may take the jobs of this lane."""
        return (
            self.tenant == offer.tenant
            and self.user in offer.users
            and self.dataset in offer.datasets
            and self.only_device_id in (None, offer.device_id)
            and self.recipe_id not in offer.declined
            and not offer.cooling_down
            and can_run(self.needs, offer)
        )


@dataclass(frozen=True)
class Head:
    """The first job of a lane, by start tag and number."""

    lane: Lane
    start_tag: int
    job_number: int

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key, the next job first: by priority, then start tag, then age."""
        return -self.lane.priority, self.start_tag, self.job_number


_COLUMNS = tuple(getattr(StoredLane, field.name) for field in fields(Lane))  # in the order of the fields
_OF_JOB = ("tenant", "user", "dataset", "only_device_id", "recipe_id", "priority")  # columns of a lane and of its jobs
_WAITS = Job.lane_number == StoredLane.number


# Built once, because it is executed several times a second.
_READY = (
    select(*_COLUMNS, select(func.count()).where(_WAITS).correlate(StoredLane).scalar_subquery().label("waiting"))
    .where(
        StoredLane.tenant == bindparam("tenant"),
        StoredLane.user.in_(bindparam("users", expanding=True)),
        exists(select(Job.number).where(_WAITS).correlate(StoredLane)),
    )
    .order_by(StoredLane.priority.desc(), StoredLane.number)
)
_FIRST = select(Job.number).where(_WAITS).order_by(Job.start_tag, Job.number).limit(1).correlate(StoredLane)
_START_TAG = select(Job.start_tag).where(_WAITS).order_by(Job.start_tag, Job.number).limit(1).correlate(StoredLane)
# Built once, because it is executed for each lease. The index `ix_jobs_lane` alone answers each of its subqueries.
_HEADS = select(
    *_COLUMNS, _FIRST.scalar_subquery().label("job_number"), _START_TAG.scalar_subquery().label("start_tag")
).where(
    StoredLane.tenant == bindparam("tenant"),
    StoredLane.user.in_(bindparam("users", expanding=True)),
    StoredLane.dataset.in_(bindparam("datasets", expanding=True)),
    or_(
        StoredLane.only_device_id.is_(None),
        StoredLane.only_device_id.in_(bindparam("device_ids", expanding=True)),
    ),
    exists(select(Job.number).where(_WAITS).correlate(StoredLane)),
)
_LANE_NUMBER = select(StoredLane.number).where(StoredLane.key == bindparam("key"))
_VIRTUAL_TIME = select(StartTag.start_tag).where(
    StartTag.tenant == bindparam("of_tenant"), StartTag.user == VIRTUAL_TIME
)


class QueueRepository(Repository):
    """Lanes and start tags in one session."""

    def lane(self, job: Job, needs: Needs) -> Lane:
        """Returns the lane of jobs with exactly the same needs as this job, and inserts it if it does not exist.

        needs: those of the job.
        """
        columns: dict[str, Any] = {name: getattr(job, name) for name in _OF_JOB}
        parts = [*columns.values(), needs.model_dump(mode="json", exclude_defaults=True)]
        key = sha256_hex(canonical_json(parts))
        # Of many jobs that become ready in one transaction, all changes are written together.
        with self._session.no_autoflush:
            number = self._session.scalar(_LANE_NUMBER, {"key": key})
        if number is None:
            self._session.flush()  # the program that the lane references may be new
            needs_json = needs.model_dump_json(exclude_defaults=True)
            add_if_absent(self._session, StoredLane, key=key, needs=needs_json, **columns)
            number = self._session.scalars(_LANE_NUMBER, {"key": key}).one()
        return Lane(number, needs=needs, **columns)

    def lane_by_number(self, number: int) -> Lane:
        """Returns a lane that is known to exist."""
        return _lane(self._session.execute(select(*_COLUMNS).where(StoredLane.number == number)).one())

    def heads(self, offer: DeviceOffer) -> list[Head]:
        """Returns the first job of each lane that admits a device, the next one first.

        Each lane of the device's users and data sets costs one index lookup, so the cost does not grow with the number
        of jobs.
        """
        return self.heads_of_each([offer])[0]

    def heads_of_each(self, offers: Sequence[DeviceOffer]) -> list[list[Head]]:
        """Returns `heads` of each offer. One statement reads those of a tenant, for up to CHUNK users."""
        heads: dict[tuple[str, str], list[Head]] = {}  # by tenant and user
        for tenant in {offer.tenant for offer in offers}:
            of_tenant = [offer for offer in offers if offer.tenant == tenant]
            users = sorted(frozenset().union(*(offer.users for offer in of_tenant)))
            asked = {
                "tenant": tenant,
                "datasets": sorted(frozenset().union(*(offer.datasets for offer in of_tenant))),
                "device_ids": [offer.device_id for offer in of_tenant],
            }
            for start in range(0, len(users), CHUNK):
                rows = read_columns(self._session, _HEADS, {**asked, "users": users[start : start + CHUNK]})
                for row in rows:
                    head = Head(_lane(row), row.start_tag, row.job_number)
                    heads.setdefault((tenant, row.user), []).append(head)
        return [_admitted(offer, heads) for offer in offers]

    def ready(self, tenant: str, users: Collection[str]) -> list[tuple[Lane, int]]:
        """Returns the lanes of users in which jobs wait, the next lane first, with the numbers of these jobs."""
        rows = read_columns(self._session, _READY, {"tenant": tenant, "users": list(users)})
        return [(_lane(row), row.waiting) for row in rows]

    def ahead(self, job: Job, most: int) -> int:
        """Returns how many jobs of its lane come before a job; at most `most` are counted."""
        before = (Job.start_tag < job.start_tag) | ((Job.start_tag == job.start_tag) & (Job.number < job.number))
        some = select(Job.number).where(Job.lane_number == job.lane_number, before).limit(most).subquery()
        return self._session.scalars(select(func.count()).select_from(some)).one()

    def take(self, head: Head) -> Job | None:
        """Returns a lane's first job that no other transaction has locked, and locks it until the transaction ends."""
        statement = select(Job).where(Job.lane_number == head.lane.number).order_by(Job.start_tag, Job.number).limit(1)
        return self._session.scalar(locked(statement, skip=True))

    def take_each(self, heads: Sequence[Head]) -> dict[int, Job]:
        """Returns those of these jobs that still wait in their lanes, by their numbers, and locks them.

        Without those that another transaction has locked.
        """
        if not heads:
            return {}
        lanes = {head.job_number: head.lane.number for head in heads}
        jobs = self._session.scalars(locked(select(Job).where(Job.number.in_(lanes)), skip=True))
        return {job.number: job for job in jobs if job.lane_number == lanes[job.number]}

    def next_start_tag(self, tenant: str, user: str) -> int:
        """Returns the start tag of a user's new job."""
        virtual_time = func.coalesce(_VIRTUAL_TIME.params(of_tenant=tenant).scalar_subquery(), 0)
        added = insert_or(self._session, StartTag).values(tenant=tenant, user=user, start_tag=virtual_time + 1)
        following, least = StartTag.start_tag + 1, added.excluded.start_tag
        statement = added.on_conflict_do_update(
            index_elements=[StartTag.tenant, StartTag.user],
            set_={"start_tag": case((following > least, following), else_=least)},
        )
        return int(self._session.scalars(statement.returning(StartTag.start_tag)).one())

    def advance(self, tenant: str, start_tag: int) -> None:
        """Advances a tenant's virtual time to the start tag of a job that a device takes. It never decreases."""
        virtual_time = self._session.scalar(_VIRTUAL_TIME, {"of_tenant": tenant}) or 0
        if virtual_time >= start_tag:
            return
        statement = insert_or(self._session, StartTag).values(tenant=tenant, user=VIRTUAL_TIME, start_tag=start_tag)
        self._session.execute(
            statement.on_conflict_do_update(
                index_elements=[StartTag.tenant, StartTag.user],
                set_={"start_tag": start_tag},
                where=StartTag.start_tag < start_tag,
            )
        )


def _admitted(offer: DeviceOffer, heads: Mapping[tuple[str, str], Sequence[Head]]) -> list[Head]:
    """Returns the heads that an offer may take, the next one first. heads: by tenant and user."""
    of_users = [head for user in offer.users for head in heads.get((offer.tenant, user), ())]
    return sorted((head for head in of_users if head.lane.admits(offer)), key=lambda head: head.order)


def _lane(row: Any) -> Lane:
    columns = {column.key: getattr(row, column.key) for column in _COLUMNS}
    return Lane(**(columns | {"needs": parse_needs(row.needs)}))


_READY_LANES = "mobizo-ready"  # the key in `Session.info`


def mark_ready(session: Session, lane: Lane) -> None:
    """Records that a job has joined a lane in this transaction."""
    session.info.setdefault(_READY_LANES, []).append(lane)


def marked_ready(session: Session) -> list[Lane]:
    """Returns the lane of each job that joined one, and clears the record. Called after the commit."""
    lanes: list[Lane] = session.info.pop(_READY_LANES, [])
    return lanes
