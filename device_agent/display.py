"""What a person or a log sees of the daemon: one live line on a terminal, structured log lines elsewhere.

Knows the daemon's events only; status.json shows the same to other processes.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

import structlog
from rich.console import Console
from rich.live import Live
from rich.text import Text

from device_agent.state import Home, Status
from shared.job import Progress

LOG_SECONDS = 10.0  # between log lines of one phase
STATUS_SECONDS = 0.5

_log = structlog.get_logger()


def configure_logs(json_lines: bool) -> None:
    """Log lines go to standard error for people, or as JSON lines to standard output for machines."""
    rendered: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json_lines
        else [structlog.dev.ConsoleRenderer(colors=False)]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *rendered,
        ],
        # Looked up at each line: while the live line is drawn, rich stands in for standard error.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stdout if json_lines else sys.stderr),
    )


class Display:
    """Shows what the daemon does: on the terminal or in the log, and in the home's status.json."""

    def __init__(self, home: Home, live: bool) -> None:
        """live: whether standard error is a terminal to draw one changing line on."""
        self._home = home
        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True) if live else None
        self._status = home.status() or Status()
        self._phase: str | None = None
        self._logged = self._written = 0.0

    def __enter__(self) -> Display:
        self._rest("idle")
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._rest("stopped")

    def begin(self, job_id: str, adapter: str) -> None:
        """A job was leased."""
        self._phase = None
        _log.info("job", job=job_id, adapter=adapter)
        self._write(self._status.model_copy(update={"state": "busy", "job_id": job_id, "adapter": adapter}))

    def progress(self, progress: Progress) -> None:
        """How far the job is."""
        now = time.monotonic()
        if self._live is not None:
            self._live.update(Text(progress.line(), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif progress.phase != self._phase or now - self._logged >= LOG_SECONDS:
            _log.info("progress", **progress.model_dump(exclude_none=True))
            self._logged = now
        if progress.phase != self._phase or now - self._written >= STATUS_SECONDS:
            self._write(self._status.model_copy(update={"progress": progress}))
        self._phase = progress.phase

    def end(self, outcome: str, detail: str | None) -> None:
        """The job in hand came to an end."""
        job_id = self._status.job_id
        if self._live is not None:
            self._live.update(Text(""), refresh=True)
        if detail is None:
            _log.info("job ended", job=job_id, outcome=outcome)
        else:
            _log.warning("job ended", job=job_id, outcome=outcome, detail=detail)
        self._write(Status(last_job_id=job_id, last_outcome=outcome, last_detail=detail))

    def _rest(self, state: str) -> None:
        """Shows that no job is in hand; how the last one ended stays."""
        last = self._status
        self._write(
            Status(
                state=state,
                last_job_id=last.last_job_id,
                last_outcome=last.last_outcome,
                last_detail=last.last_detail,
            )
        )

    def _write(self, status: Status) -> None:
        self._status = Status.model_validate(status.model_dump(exclude={"pid", "updated_at"}))
        self._home.write_status(self._status)
        self._written = time.monotonic()
