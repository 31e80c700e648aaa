"""What a transaction asked to have compiled or converted, for an engine that tells workers. Knows no engine."""

from __future__ import annotations

from sqlalchemy.orm import Session

_KEY = "mobizo-wanted"


def note_wanted(session: Session, waiting_id: str) -> None:
    """Notes that a program, by its recipe's id, or a conversion waits for a worker."""
    session.info.setdefault(_KEY, set()).add(waiting_id)


def noted_wanted(session: Session) -> list[str]:
    """What was noted since this was asked last, in order."""
    found: set[str] = session.info.pop(_KEY, set())
    return sorted(found)
