"""What became ready in a transaction, for those who are told when it is committed. Knows no listener."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.queue.repository import Line

_KEY = "mobizo-ready"


def note_ready(session: Session, line: Line) -> None:
    """Notes that a job has got in line."""
    session.info.setdefault(_KEY, []).append(line)


def noted_ready(session: Session) -> list[Line]:
    """The lane of each job that got in line, once for each; to be asked when the transaction is committed."""
    found: list[Line] = session.info.pop(_KEY, [])
    return found
