"""What a compile is doing, in words for those who watch a job, and when that is news. Knows no database."""

from __future__ import annotations

import time
from typing import Any

import structlog

from shared.job import Progress

TELL_SECONDS = 3.0  # least time between two pieces of news: each is an event of every job that waits
_WORDS = {
    "read": "reading the base model",
    "lower": "lowering its layers",
    "emit": "writing the program",
}
_log = structlog.get_logger()


class Stages:
    """Listens to one compiler. `hear` may be called from another thread than `news`.

    log: to which the worker and the recipe are bound, so that its lines can be found by them.
    """

    def __init__(self, log: structlog.typing.FilteringBoundLogger | None = None) -> None:
        self._log = log if log is not None else _log
        self._words: str | None = None
        self._told: str | None = None
        self._told_at = float("-inf")

    def hear(self, said: dict[str, Any]) -> None:
        """The compiler says where it is."""
        self._log.info("compiling", said=said)
        stage, fraction = said.get("stage"), said.get("fraction")
        if isinstance(stage, str):
            words = _WORDS.get(stage, stage[:100])
            share = isinstance(fraction, int | float) and 0 < fraction < 1
            self._words = f"{words}, {fraction:.0%}" if share else words

    def news(self) -> Progress | None:
        """What the jobs that wait are to be told now, if anything."""
        words = self._words
        if words is None or words == self._told or time.monotonic() - self._told_at < TELL_SECONDS:
            return None
        self._told, self._told_at = words, time.monotonic()
        return Progress(phase="compiling", why=words)
