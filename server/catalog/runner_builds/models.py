"""The table of runner builds."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Document, Moment, Numbered, Table
from server.storage.store import FileReferences
from shared.catalog import SignedRunnerBuild


class StoredRunnerBuild(Numbered, Table):
    """The build that devices of one platform get. Belongs to the server, not to a tenant."""

    __tablename__ = "runners"

    platform: Mapped[str] = mapped_column(String(100), unique=True)
    signed: Mapped[SignedRunnerBuild] = mapped_column(Document(SignedRunnerBuild))
    added_at: Mapped[datetime] = mapped_column(Moment)


def _builds(session: Session) -> list[str]:
    return [runner.signed.build.sha256 for runner in session.scalars(select(StoredRunnerBuild))]


FILES = FileReferences(documents=_builds)
