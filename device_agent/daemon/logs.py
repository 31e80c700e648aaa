"""The agent's log file, home/logs/agent.jsonl: structured lines of bounded size.

A full file is renamed to agent.jsonl.1, which replaces the previous one.
"""

from __future__ import annotations

import json
import os
import sys
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
    """Returns the log file's path in a home."""
    return home / "logs" / "agent.jsonl"


class LogFile:
    """A structlog processor that appends each event to the log file and passes it on unchanged."""

    def __init__(self, path: Path, limit: int = FILE_BYTES) -> None:
        """limit: file size in bytes at which the log is rotated."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path, self._limit = path, limit
        self._lock = threading.Lock()

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Appends one event. Errors are ignored: a full disk must not stop training."""
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
    """Returns the path of the rotated log."""
    return path.with_name(path.name + ".1")


def tail(path: Path, lines: int) -> list[str]:
    """Returns the last lines of the log, oldest first."""
    kept: list[str] = []
    for file in (path, older(path)):
        if len(kept) < lines and file.exists():
            kept = file.read_text(errors="replace").splitlines()[-(lines - len(kept)) :] + kept
    return kept


def follow(path: Path, wait: Callable[[float], object] = time.sleep) -> Iterator[str]:
    """Yields new lines for ever, across rotations. wait: called when there are none."""
    file = path.open(errors="replace") if path.exists() else None
    if file is not None:
        file.seek(0, os.SEEK_END)
    return _follow(path, file, wait)


def _follow(path: Path, file: TextIO | None, wait: Callable[[float], object]) -> Iterator[str]:
    rest = ""
    try:
        while True:
            while file is not None and (piece := file.read(1 << 16)):
                *complete, rest = (rest + piece).split("\n")
                yield from complete
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
    """Formats one log line for people: time, level, event, then name=value pairs."""
    try:
        record = json.loads(line)
        when, level, event = record.pop("timestamp"), record.pop("level"), record.pop("event")
    except (ValueError, KeyError, TypeError, AttributeError):
        return line
    trace = record.pop("exception", None)
    parts = [when, f"{level:7}", event, *(f"{name}={value}" for name, value in sorted(record.items()))]
    return " ".join(parts) + (f"\n{trace}" if trace else "")


def configure_logs(json_lines: bool, *files: structlog.typing.Processor) -> None:
    """Configures structlog: text on standard error, or JSON lines on standard output.

    files: processors that also store each event, such as `LogFile`.
    """
    rendered: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json_lines
        else [structlog.dev.ConsoleRenderer(colors=False)]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *files,
            *rendered,
        ],
        # Looked up for each line, because rich replaces sys.stderr while the live line is shown.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stdout if json_lines else sys.stderr),
    )
