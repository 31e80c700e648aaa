"""Reports the daemon's activity: in the log, in status.json, and to systemd with its watchdog.

The log file, home/logs/agent.jsonl, has structured lines and a bounded size. A full file is renamed to agent.jsonl.1,
which replaces the previous one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import structlog
from structlog.typing import EventDict, WrappedLogger

from device_agent.home import AgentHome, DaemonStatus
from shared.durable import write_pieces
from shared.job import Progress, RoundRef

FILE_BYTES = 2 << 20  # of each of the two
LOG_SECONDS = 10.0  # between log lines of one phase
STATUS_SECONDS = 0.5  # between reports of one phase in status.json and to systemd
_log = structlog.get_logger()


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
        with self._lock, suppress(OSError):
            if self._path.exists() and self._path.stat().st_size + len(line) > self._limit:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        return event


def tail(path: Path, lines: int) -> list[str]:
    """Returns the last lines of the log, oldest first."""
    files = (path.with_name(f"{path.name}.1"), path)
    logged = [line for file in files if file.exists() for line in file.read_text(errors="replace").splitlines()]
    return logged[max(len(logged) - lines, 0) :]


def readable(line: str) -> str:
    """Formats one log line for people, as the daemon prints it on standard error."""
    try:
        return structlog.dev.ConsoleRenderer(colors=False)(None, "", json.loads(line))
    except (ValueError, TypeError, AttributeError):
        return line


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
        logger_factory=lambda *_: structlog.PrintLogger(sys.stdout if json_lines else sys.stderr),
    )


class Display:
    """Shows the daemon's activity in the log and in status.json."""

    def __init__(self, home: AgentHome) -> None:
        self._home = home
        # Keep the last job's outcome across restarts; device warnings are determined again.
        previous = home.status() or DaemonStatus()
        self._status = previous.model_copy(update={"unknown": ()})
        self._phase: str | None = None
        self._logged_at = self._written_at = 0.0

    def __enter__(self) -> Display:
        self._write(self._without_job("idle"))
        return self

    def __exit__(self, *exception_info: object) -> None:
        self._write(self._without_job("stopped"))

    def idle(self) -> None:
        """The daemon requests a job."""
        if self._status.state != "idle":
            self._write(self._without_job("idle"))

    def hold(self, state: Literal["waiting", "refused"], why: str) -> None:
        """No job is requested, because the rules forbid training or the server refuses this device."""
        if (self._status.state, self._status.why) == (state, why):
            return
        # Reasons contain sensor readings; log only changes of state.
        if self._status.state != state:
            _log.warning(state, why=why)
        self._write(self._without_job(state).model_copy(update={"why": why}))

    def unknown(self, rules: tuple[str, ...]) -> None:
        """Rules for which this device has no sensor."""
        if rules == self._status.unknown:
            return
        if rules:
            _log.warning("rules without a sensor on this device are not enforced", rules=", ".join(rules))
        self._write(self._status.model_copy(update={"unknown": rules}))

    def begin(self, job_id: str, adapter: str, of: RoundRef | None = None) -> None:
        """A job was leased. of: its federated round, if any."""
        self._phase = None
        part = {} if of is None else {"cohort": of.cohort, "round": of.number}
        _log.info("job", job=job_id, adapter=adapter, **part)
        busy = {"state": "busy", "job_id": job_id, "adapter": adapter, "round": of, "why": None}
        self._write(self._status.model_copy(update=busy))

    def progress(self, progress: Progress) -> bool:
        """The job has made progress. Returns whether it was reported: a new phase at once, others at intervals."""
        now = time.monotonic()
        if progress.phase != self._phase or now - self._logged_at >= LOG_SECONDS:
            _log.info("progress", **progress.model_dump(exclude_none=True))
            self._logged_at = now
        report = progress.phase != self._phase or now - self._written_at >= STATUS_SECONDS
        if report:
            self._write(self._status.model_copy(update={"progress": progress}))
        self._phase = progress.phase
        return report

    def end(self, outcome: str, detail: str | None) -> None:
        """The current job has ended."""
        job_id = self._status.job_id
        if detail is None:
            _log.info("job ended", job=job_id, outcome=outcome)
        else:
            _log.warning("job ended", job=job_id, outcome=outcome, detail=detail)
        last = {"last_job_id": job_id, "last_outcome": outcome, "last_detail": detail}
        self._write(self._without_job("idle").model_copy(update=last))

    def _without_job(self, state: str) -> DaemonStatus:
        """Returns the status without a current job; keeps the last job's outcome and the device's warnings."""
        nothing = {"state": state, "job_id": None, "adapter": None, "round": None, "progress": None, "why": None}
        return self._status.model_copy(update=nothing)

    def _write(self, status: DaemonStatus) -> None:
        self._status = DaemonStatus.model_validate(status.model_dump())
        self._written_at = time.monotonic()
        # A full disk must not end a job because of status.json.
        with suppress(OSError):
            # Atomically, but not synced: it is obsolete after a power cut.
            content = self._status.model_dump_json(indent=1).encode()
            write_pieces(self._home.path / "status.json", (content,), synced=False)


class Watchdog:
    """Feeds systemd's watchdog on progress."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """environment: names systemd's socket."""
        self._address = environment.get("NOTIFY_SOCKET", "")

    def notify(self, text: str) -> None:
        """Sends a message to systemd, such as READY=1 or STOPPING=1; see sd_notify(3)."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as messenger:
            messenger.setblocking(False)
            # systemd may be unavailable, or may not have read what it was sent; training continues.
            with suppress(OSError):
                messenger.sendto(text.encode(), address)

    def feed(self, status: str = "idle") -> None:
        """Feeds the watchdog: once per iteration of the main loop, and on progress. status: of the unit."""
        self.notify(f"WATCHDOG=1\nSTATUS={status}")
