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
from shared.job import Progress, RoundRef

LOG_SECONDS = 10.0  # between log lines of one phase
STATUS_SECONDS = 0.5

_log = structlog.get_logger()


def configure_logs(json_lines: bool, *files: structlog.typing.Processor) -> None:
    """Log lines go to standard error for people, or as JSON lines to standard output for machines.

    files: processors that keep what they are given, such as `LogFile`.
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
        # Looked up at each line: while the live line is drawn, rich stands in for standard error.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stdout if json_lines else sys.stderr),
    )


class Display:
    """Shows what the daemon does: on the terminal or in the log, and in the home's status.json."""

    def __init__(self, home: Home, live: bool) -> None:
        """live: whether standard error is a terminal to draw one changing line on."""
        self._home = home
        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True) if live else None
        # How the last job ended is worth knowing after a restart; what was known of the device is found out again.
        before = home.status() or Status()
        self._status = before.model_copy(update={"unknown": (), "clock_skew_seconds": None})
        self._phase: str | None = None
        self._logged = self._written = 0.0
        self._full = False

    def __enter__(self) -> Display:
        self._write(self._rested("idle"))
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._write(self._rested("stopped"))

    def idle(self) -> None:
        """A job is asked for."""
        if self._status.state != "idle":
            self._write(self._rested("idle"))

    def waiting(self, why: str) -> None:
        """The rules allow no training now, so no job is asked for."""
        self._hold("waiting", why)

    def refused(self, why: str) -> None:
        """The server does not know this device any more."""
        self._hold("refused", why)

    def unknown(self, rules: tuple[str, ...]) -> None:
        """Rules that no sensor of this device can answer."""
        if rules == self._status.unknown:
            return
        if rules:
            _log.warning("rules that no sensor of this device can answer are not held", rules=", ".join(rules))
        self._write(self._status.model_copy(update={"unknown": rules}))

    def skew(self, seconds: float) -> None:
        """This device's clock is that far ahead of the server's."""
        if self._status.clock_skew_seconds is None:
            _log.warning("this device's clock and the server's disagree; leases go by the server's", seconds=seconds)
            self._write(self._status.model_copy(update={"clock_skew_seconds": seconds}))

    def begin(self, job_id: str, adapter: str, of: RoundRef | None = None) -> None:
        """A job was leased. of: the round that it belongs to."""
        self._phase = None
        part = {} if of is None else {"cohort": of.cohort, "round": of.number}
        _log.info("job", job=job_id, adapter=adapter, **part)
        busy = {"state": "busy", "job_id": job_id, "adapter": adapter, "round": of, "why": None}
        self._write(self._status.model_copy(update=busy))

    def progress(self, progress: Progress) -> None:
        """How far the job is."""
        now = time.monotonic()
        if self._live is not None:
            line = progress.line() if self._status.round is None else f"{self._status.round.words}  {progress.line()}"
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
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
        last = {"last_job_id": job_id, "last_outcome": outcome, "last_detail": detail}
        self._write(self._rested("idle").model_copy(update=last))

    def _hold(self, state: str, why: str) -> None:
        if (self._status.state, self._status.why) == (state, why):
            return
        # Words with a reading in them change with it: one line a change of state is enough.
        if self._status.state != state:
            _log.warning(state, why=why)
        self._write(self._rested(state).model_copy(update={"why": why}))

    def _rested(self, state: str) -> Status:
        """No job is in hand; how the last one ended stays, and what is known of this device."""
        nothing = {"state": state, "job_id": None, "adapter": None, "round": None, "progress": None, "why": None}
        return self._status.model_copy(update=nothing)

    def _write(self, status: Status) -> None:
        self._status = Status.model_validate(status.model_dump(exclude={"pid", "updated_at"}))
        self._written = time.monotonic()
        try:
            self._home.write_status(self._status)
        except OSError as error:
            # A full disk must not end a job for a file that only shows it.
            if not self._full:
                _log.warning("status.json cannot be written", detail=str(error))
            self._full = True
        else:
            self._full = False
