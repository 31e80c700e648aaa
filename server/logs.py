"""Structured logs on standard error: JSON lines, or readable ones where a person looks."""

from __future__ import annotations

import logging
import sys

import structlog

_CHATTY_LIBRARIES = ("alembic", "uvicorn", "httpx", "dbos")  # libraries that log every step


def configure_logs() -> None:
    """Sends our events, and warnings of libraries, to standard error.

    Through the standard library, which survives a reader of our standard error that went away.
    """
    # Plain tracebacks: the pretty ones print local variables, and those may be tokens.
    rendering: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if sys.stderr.isatty()
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *rendering,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    for name in _CHATTY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    # Without a handler of its own DBOS would add one with another format.
    logging.getLogger("dbos").addHandler(logging.NullHandler())
