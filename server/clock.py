"""The current time, always UTC and aware: the one place that reads the clock."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> datetime:
    """Now."""
    return datetime.now(UTC)
