"""Minutes trained on each local day, over all jobs; a file that survives a kill. Knows no clock and no rule."""

from __future__ import annotations

import json
import math
from datetime import date
from pathlib import Path

from device_agent.durable import write_durably

KEPT_DAYS = 14


class DailyBudget:
    """What was spent, by date.

    A clock that steps back finds what that day had spent already. A file that is no such record counts as empty: at
    worst one day's budget is given twice.
    """

    def __init__(self, path: Path) -> None:
        """path: in the agent's home; made at the first `add`."""
        self._path = path
        self._minutes = _read(path)

    def spent(self, today: date) -> float:
        """Minutes trained on a day."""
        return self._minutes.get(today.isoformat(), 0.0)

    def add(self, minutes: float, today: date) -> None:
        """Adds time trained (by a monotonic clock, so never negative), synced; a kill loses what was not yet added.

        Raises ValueError for a time that is none, OSError if the disk is full: the minutes then count until this
        process ends.
        """
        if not (math.isfinite(minutes) and minutes >= 0):
            raise ValueError(f"{minutes} minutes is no time trained")
        # The day last added to goes to the end, so that a clock far ahead for a while does not push out the true days.
        self._minutes[today.isoformat()] = self._minutes.pop(today.isoformat(), 0.0) + minutes
        self._minutes = dict(list(self._minutes.items())[-KEPT_DAYS:])
        write_durably(self._path, json.dumps(self._minutes).encode())


def _read(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_bytes())
        return {date.fromisoformat(day).isoformat(): _minutes(value) for day, value in found.items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}


def _minutes(value: object) -> float:
    if not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value!r} is no time trained")
    return float(value)
