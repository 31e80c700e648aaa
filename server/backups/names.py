"""Which stored files a database names. Knows no store."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.artifacts.naming import NAMES
from server.leases.models import JobLease
from server.runners.models import Runner


def named_files(session: Session) -> frozenset[str]:
    """sha256 of every file that must be there."""
    named: set[str] = set()
    for column, rows in NAMES:
        named |= set(session.scalars(select(column).where(rows, column.is_not(None)).distinct()))
    runners = session.scalars(select(Runner)).all()
    return frozenset(named | {runner.signed.build.sha256 for runner in runners})


def uploaded_files(session: Session) -> frozenset[str]:
    """sha256 of what devices sent for leases that are not completed; of one that ended, it may be gone."""
    columns = JobLease.upload_sha256, JobLease.trajectory_sha256
    found = [session.scalars(select(column).where(column.is_not(None)).distinct()) for column in columns]
    return frozenset(sha256 for few in found for sha256 in few if sha256 is not None)
