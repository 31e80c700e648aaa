"""All SQL about conversions and their files."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

from server.adapters.models import Adapter, StoredVersion
from server.db.locking import locked
from server.formats.models import Conversion, ConversionFile, ConversionState
from server.programs.models import CompileTurn, Worker


class ConversionRepository:
    """Conversions in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def of_version(self, version: StoredVersion) -> Conversion | None:
        """The conversion of a version."""
        return self._session.scalar(select(Conversion).where(Conversion.version_number == version.number))

    def of_version_locked(self, version: StoredVersion) -> Conversion:
        """The conversion of a version, known to exist; nobody else changes it until the transaction ends."""
        statement = select(Conversion).where(Conversion.version_number == version.number)
        return self._session.scalars(locked(statement)).one()

    def files(self, conversion: Conversion) -> Sequence[ConversionFile]:
        """Its files by name; none until it is ready."""
        statement = select(ConversionFile).where(ConversionFile.conversion_number == conversion.number)
        return self._session.scalars(statement.order_by(ConversionFile.path)).all()

    def add_files(self, files: Sequence[ConversionFile]) -> None:
        """Stores the files of a conversion."""
        self._session.add_all(files)

    def version(self, conversion: Conversion) -> tuple[Adapter, StoredVersion]:
        """What it converts."""
        version = self._session.get_one(StoredVersion, conversion.version_number)
        return self._session.get_one(Adapter, version.adapter_number), version

    def held(self, conversion_id: str, worker_id: str) -> Conversion | None:
        """The conversion, if it is still that worker's to make; locked."""
        statement = select(Conversion).where(
            Conversion.id == conversion_id,
            Conversion.worker_id == worker_id,
            Conversion.state == ConversionState.CONVERTING,
        )
        return self._session.scalar(locked(statement))

    def next(self, now: datetime, most_bytes: int | None = None) -> tuple[Conversion, str] | None:
        """The conversion whose turn it is, of those that take at most `most_bytes`, and its tenant; locked.

        Tenants take turns, the same turns as with compiles.
        """
        statement = (
            select(Conversion, Adapter.tenant)
            .join(StoredVersion, StoredVersion.number == Conversion.version_number)
            .join(Adapter, Adapter.number == StoredVersion.adapter_number)
            .join(CompileTurn, CompileTurn.tenant == Adapter.tenant)
            .where(_can_start(now))
            .order_by(CompileTurn.turn, Conversion.number)
        )
        if most_bytes is not None:
            statement = statement.where(Conversion.memory_bytes <= most_bytes)
        row = self._session.execute(locked(statement.limit(1), of=Conversion, skip=True)).first()
        return None if row is None else (row[0], row[1])

    def any(self, now: datetime) -> bool:
        """Whether there is something for a worker to do: a conversion to begin, or one to take back."""
        return self._session.scalar(select(Conversion.number).where(_to_claim(now)).limit(1)) is not None

    def startable(self, now: datetime, limit: int) -> Sequence[str]:
        """Ids of conversions that may be begun now, or taken back from a worker that fell silent."""
        statement = select(Conversion.id).where(_to_claim(now)).order_by(Conversion.number)
        return self._session.scalars(statement.limit(limit)).all()

    def lapsed(self, now: datetime) -> Sequence[Conversion]:
        """Conversions whose worker has not been heard from in time; locked until the transaction ends."""
        statement = select(Conversion).where(_lapsed(now)).order_by(Conversion.number)
        return self._session.scalars(locked(statement, skip=True)).all()

    def under_way(self, pid_space: str) -> Sequence[tuple[Conversion, Worker]]:
        """Conversions that are made where process numbers mean what they do here, and their workers."""
        statement = (
            select(Conversion, Worker)
            .join(Worker, Worker.id == Conversion.worker_id)
            .where(Conversion.state == ConversionState.CONVERTING, Worker.pid_space == pid_space)
            .order_by(Conversion.number)
        )
        return [(row[0], row[1]) for row in self._session.execute(statement)]

    def holders(self, now: datetime) -> Sequence[str]:
        """Ids of the workers that hold a conversion now."""
        statement = select(Conversion.worker_id).where(
            Conversion.state == ConversionState.CONVERTING, Conversion.lease_expires_at >= now
        )
        return [worker_id for worker_id in self._session.scalars(statement) if worker_id is not None]


def _can_start(now: datetime) -> ColumnElement[bool]:
    due = or_(Conversion.next_attempt_at.is_(None), Conversion.next_attempt_at <= now)
    return (Conversion.state == ConversionState.PENDING) & due


def _lapsed(now: datetime) -> ColumnElement[bool]:
    return (Conversion.state == ConversionState.CONVERTING) & (Conversion.lease_expires_at < now)


def _to_claim(now: datetime) -> ColumnElement[bool]:
    return or_(_can_start(now), _lapsed(now))
