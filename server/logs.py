"""Structured logs on standard error: JSON lines, or coloured ones where a person looks."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs() -> None:
    """Sends our events and those of libraries (warnings and up) to standard error."""
    # Plain tracebacks: the pretty ones print local variables, and those may be tokens.
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback) if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if sys.stderr.isatty() else [structlog.processors.format_exc_info]),
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
