"""All SQL of the queue: lanes, their first jobs, and turns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, bindparam, case, exists, func, or_, select
from sqlalchemy.dialects.postgresql import insert as insert_postgresql
from sqlalchemy.dialects.sqlite import insert as insert_sqlite
from sqlalchemy.orm import Session

from server.db.locking import locked
from server.jobs.models import Job
from server.queue.matching import Asking, Needs, able, parse_needs
from server.queue.models import Lane, Turn
from shared.canonical import canonical_json, sha256_hex

CLOCK = ""  # the user, whom no request can name, that holds a tenant's clock


@dataclass(frozen=True, eq=False)
class Line:
    """A lane as devices are matched with it."""

    number: int
    tenant: str
    dataset: str
    only_device_id: str | None
    recipe_id: str
    priority: int
    needs: Needs

    def admits(self, asking: Asking) -> bool:
        """Whether a device may be given the jobs that wait here."""
        return (
            self.tenant == asking.tenant
            and self.dataset in asking.datasets
            and self.only_device_id in (None, asking.device_id)
            and self.recipe_id not in asking.declined
            and not asking.rests
            and able(self.needs, asking)
        )


@dataclass(frozen=True)
class Head:
    """A lane's first job, by its turn and number."""

    line: Line
    turn: int
    job_number: int

    @property
    def order(self) -> tuple[int, int, int]:
        """Smaller is sooner: by priority, then turn, then age."""
        return -self.line.priority, self.turn, self.job_number


_COLUMNS = (
    Lane.number,
    Lane.tenant,
    Lane.dataset,
    Lane.only_device_id,
    Lane.recipe_id,
    Lane.priority,
    Lane.needs,
)

_WAITS = Job.lane_number == Lane.number
# Built once, since it is asked several times a second.
_READY = (
    select(*_COLUMNS, select(func.count()).where(_WAITS).correlate(Lane).scalar_subquery().label("waiting"))
    .where(
        Lane.tenant == bindparam("tenant"),
        Lane.dataset.in_(bindparam("datasets", expanding=True)),
        exists(select(Job.number).where(_WAITS).correlate(Lane)),
    )
    .order_by(Lane.priority.desc(), Lane.number)
)


class QueueRepository:
    """Lanes and turns in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def lane(self, job: Job, needs: Needs) -> Line:
        """The lane of jobs that ask for exactly what this one does, made if it is not there; of two, one makes it.

        needs: the job's.
        """
        tenant, dataset, device_id = job.tenant, job.dataset, job.only_device_id
        recipe_id, priority = job.recipe_id, job.priority
        asked = needs.model_dump_json(exclude_defaults=True)
        parts = [tenant, dataset, device_id, recipe_id, priority, needs.model_dump(mode="json", exclude_defaults=True)]
        key = sha256_hex(canonical_json(parts))
        found = select(Lane.number).where(Lane.key == key)
        number = self._session.scalar(found)
        if number is None:
            values = {
                "key": key,
                "tenant": tenant,
                "dataset": dataset,
                "only_device_id": device_id,
                "recipe_id": recipe_id,
                "priority": priority,
                "needs": asked,
            }
            self._session.flush()  # the program that the lane names may be new
            self._session.execute(self._insert(Lane).values(**values).on_conflict_do_nothing())
            number = self._session.scalars(found).one()
        return Line(number, tenant, dataset, device_id, recipe_id, priority, needs)

    def line(self, number: int) -> Line:
        """A lane that is known to exist."""
        return _line(self._session.execute(select(*_COLUMNS).where(Lane.number == number)).one())

    def heads(self, asking: Asking) -> list[Head]:
        """The first job of each lane that admits a device, the soonest first.

        One look into the index of jobs for each lane of the device's data sets: what it costs does not grow with jobs.
        """
        statement = heads_of(asking.tenant, sorted(asking.datasets)).where(
            or_(Lane.only_device_id.is_(None), Lane.only_device_id == asking.device_id)
        )
        rows = self._session.execute(statement).all()
        heads = [Head(_line(row), row.turn, row.job_number) for row in rows]
        return sorted((head for head in heads if head.line.admits(asking)), key=lambda head: head.order)

    def ready(self, tenant: str, datasets: Collection[str]) -> list[tuple[Line, int]]:
        """The lanes of data sets where jobs wait, and how many; the soonest first."""
        rows = self._session.execute(_READY, {"tenant": tenant, "datasets": list(datasets)})
        return [(_line(row), row.waiting) for row in rows]

    def ahead(self, job: Job, most: int) -> int:
        """How many jobs of its lane come before a job, counted up to `most`."""
        before = (Job.turn < job.turn) | ((Job.turn == job.turn) & (Job.number < job.number))
        some = select(Job.number).where(Job.lane_number == job.lane_number, before).limit(most).subquery()
        return self._session.scalars(select(func.count()).select_from(some)).one()

    def take(self, head: Head) -> Job | None:
        """A lane's first job that nobody else is taking, locked until the transaction ends."""
        statement = select(Job).where(Job.lane_number == head.line.number).order_by(Job.turn, Job.number).limit(1)
        return self._session.scalar(locked(statement, skip=True))

    def next_turn(self, tenant: str, user: str) -> int:
        """The turn of a user's new job: after the user's last one, and not before the tenant's clock.

        Start-time fair queueing (Goyal, Vin and Cheng, 1996) where every job costs 1: of two users who have jobs
        waiting each gets every second one, however many either has, and who comes late has missed nothing.
        """
        clock = self._turn(tenant, CLOCK)
        statement = (
            self._insert(Turn)
            .values(tenant=tenant, user=user, turn=clock + 1)
            .on_conflict_do_update(
                index_elements=[Turn.tenant, Turn.user],
                set_={"turn": case((Turn.turn >= clock, Turn.turn + 1), else_=clock + 1)},
            )
            .returning(Turn.turn)
        )
        return int(self._session.scalars(statement).one())

    def advance(self, tenant: str, turn: int) -> None:
        """Moves a tenant's clock on to the turn of a job that a device takes; it never goes back."""
        if self._turn(tenant, CLOCK) >= turn:
            return
        statement = self._insert(Turn).values(tenant=tenant, user=CLOCK, turn=turn)
        self._session.execute(
            statement.on_conflict_do_update(
                index_elements=[Turn.tenant, Turn.user], set_={"turn": turn}, where=Turn.turn < turn
            )
        )

    def _turn(self, tenant: str, user: str) -> int:
        return self._session.scalar(select(Turn.turn).where(Turn.tenant == tenant, Turn.user == user)) or 0

    def _insert(self, table: type[Lane] | type[Turn]) -> Any:
        insert = insert_sqlite if self._session.get_bind().dialect.name == "sqlite" else insert_postgresql
        return insert(table)


def heads_of(tenant: str, datasets: Sequence[str]) -> Select[Any]:
    """Lanes of data sets in which a job waits, with `turn` and `job_number` of the first.

    Each of its inner looks is answered by the index `ix_jobs_lane` alone.
    """
    first = select(Job.number).where(_WAITS).order_by(Job.turn, Job.number).limit(1).correlate(Lane)
    turn = select(Job.turn).where(_WAITS).order_by(Job.turn, Job.number).limit(1).correlate(Lane)
    return select(*_COLUMNS, first.scalar_subquery().label("job_number"), turn.scalar_subquery().label("turn")).where(
        Lane.tenant == tenant, Lane.dataset.in_(datasets), exists(select(Job.number).where(_WAITS).correlate(Lane))
    )


def _line(row: Any) -> Line:
    return Line(
        row.number,
        row.tenant,
        row.dataset,
        row.only_device_id,
        row.recipe_id,
        row.priority,
        parse_needs(row.needs),
    )
