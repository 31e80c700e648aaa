"""What a transaction asked to have compiled, for an engine that tells workers. Knows no engine."""

from __future__ import annotations

from sqlalchemy.orm import Session

_KEY = "mobizo-wanted"


def note_wanted(session: Session, recipe_id: str) -> None:
    """Notes that a recipe's program waits for a worker."""
    session.info.setdefault(_KEY, set()).add(recipe_id)


def noted_wanted(session: Session) -> list[str]:
    """What was noted since this was asked last, in order."""
    found: set[str] = session.info.pop(_KEY, set())
    return sorted(found)
