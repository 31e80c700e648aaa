"""The agent's log on this disk: structured lines in home/logs/agent.jsonl, of bounded size. Knows no terminal.

When the file is full it becomes agent.jsonl.1, and a new one begins; what was agent.jsonl.1 is gone.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

FILE_BYTES = 2 << 20  # of each of the two
POLL_SECONDS = 0.5


def log_path(home: Path) -> Path:
    """Where the log of a home's agent lies."""
    return home / "logs" / "agent.jsonl"


class LogFile:
    """A processor of structlog's that writes each event to the file and hands it on as it was."""

    def __init__(self, path: Path, limit: int = FILE_BYTES) -> None:
        """limit: bytes of the file before it is set aside."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path, self._limit = path, limit
        self._lock = threading.Lock()

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Writes one event; a full disk loses it, since a log line must not stop training."""
        record = structlog.processors.format_exc_info(logger, method, dict(event))
        line = json.dumps(record, default=str).encode() + b"\n"
        with self._lock:
            try:
                self._append(line)
            except OSError:
                return event
        return event

    def _append(self, line: bytes) -> None:
        if self._path.exists() and self._path.stat().st_size + len(line) > self._limit:
            self._path.replace(older(self._path))
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def older(path: Path) -> Path:
    """Where a full log goes."""
    return path.with_name(path.name + ".1")


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of the log, oldest first; none if there is no log yet."""
    found: list[str] = []
    for file in (path, older(path)):
        if len(found) < lines and file.exists():
            found = file.read_text(errors="replace").splitlines()[-(lines - len(found)) :] + found
    return found


def follow(path: Path, wait: Callable[[float], object] = time.sleep) -> Iterator[str]:
    """Lines as they are written from now on, for ever, over any change of file. wait: called when there are none."""
    file = path.open(errors="replace") if path.exists() else None
    if file is not None:
        file.seek(0, os.SEEK_END)
    return _follow(path, file, wait)


def _follow(path: Path, file: TextIO | None, wait: Callable[[float], object]) -> Iterator[str]:
    rest = ""
    try:
        while True:
            while file is not None and (piece := file.read(1 << 16)):
                *whole, rest = (rest + piece).split("\n")
                yield from whole
            if path.exists() and (file is None or not os.path.samestat(os.fstat(file.fileno()), path.stat())):
                if file is not None:
                    file.close()
                file, rest = path.open(errors="replace"), ""
            else:
                wait(POLL_SECONDS)
    finally:
        if file is not None:
            file.close()


def readable(line: str) -> str:
    """One line of the log for people: when, how serious, what, and the rest as name=value."""
    try:
        record = json.loads(line)
        when, level, event = record.pop("timestamp"), record.pop("level"), record.pop("event")
    except (ValueError, KeyError, TypeError, AttributeError):
        return line
    trace = record.pop("exception", None)
    words = [when, f"{level:7}", event, *(f"{name}={value}" for name, value in sorted(record.items()))]
    return " ".join(words) + (f"\n{trace}" if trace else "")
