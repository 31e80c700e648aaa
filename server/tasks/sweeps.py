"""Periodic sweeps: each runs on a schedule of DBOS, in one worker at a time.

A sweep that raises stops neither its worker nor other sweeps. Its failure is stored, shown by `/readyz` and on the
Operations page until the sweep succeeds, and the sweep is tried again after a pause that doubles with each failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import structlog
from sqlalchemy import String, Text, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Table, UtcTime, utc_now
from server.database.database import Collision, Database, DatabaseUnavailable

OUTAGES = (DatabaseUnavailable, Collision)
EVERY_TWO_SECONDS, EVERY_MINUTE, EVERY_TEN_MINUTES = "*/2 * * * * *", "0 * * * * *", "0 */10 * * * *"  # cron
_FIRST_PAUSE, _MAX_PAUSE = timedelta(seconds=5), timedelta(minutes=10)
_MAX_DETAIL = 1000  # characters
_log = structlog.get_logger()


class SweepFailure(Table):
    """A sweep, or its part that concerns one subject, that failed when it ran last."""

    __tablename__ = "sweep_failures"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    subject: Mapped[str] = mapped_column(String(200), primary_key=True)  # for example a cohort; empty: all of the sweep
    failures: Mapped[int] = mapped_column(default=0)  # in a row
    error: Mapped[str] = mapped_column(Text, default="")
    failed_at: Mapped[datetime] = mapped_column(UtcTime)
    not_before: Mapped[datetime] = mapped_column(UtcTime)


def failing_sweeps(session: Session) -> Sequence[SweepFailure]:
    """Returns the failures of sweeps, the latest first."""
    return session.scalars(select(SweepFailure).order_by(SweepFailure.failed_at.desc())).all()


def run_guarded(database: Database, name: str, run: Callable[[], object], subject: str = "") -> None:
    """Runs a sweep, or its part for one subject, unless it failed shortly before. Raises nothing."""
    key = (name, subject)
    try:
        with database.reading() as session:
            previous = session.get(SweepFailure, key)
        if previous is not None and previous.not_before > utc_now():
            return
        try:
            run()
        except OUTAGES:
            raise
        except Exception as error:
            _log.error("sweep-failed", sweep=name, subject=subject, exc_info=True)
            now, failures = utc_now(), 1 if previous is None else previous.failures + 1
            failure = SweepFailure(name=name, subject=subject, failures=failures, failed_at=now)
            failure.error = f"{type(error).__name__}: {error}"[:_MAX_DETAIL]
            failure.not_before = now + min(_FIRST_PAUSE * 2 ** min(failures - 1, 10), _MAX_PAUSE)
            with database.writing() as session:
                session.merge(failure)
        else:
            if previous is not None:
                with database.writing() as session:
                    session.delete(session.get_one(SweepFailure, key))
                _log.info("sweep-recovered", sweep=name, subject=subject)
    except OUTAGES as error:
        _log.warning("database-away", sweep=name, error=str(error))
