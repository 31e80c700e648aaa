"""What the server has the scorer's process run: `start`, and then one call of its `ServedModels` at a time.

The server imports this module without torch.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from server.inference.errors import ScorerFull
from server.logs import configure_logs
from server.settings import Settings
from server.tasks.child_process import die_with_parent
from shared.errors import MobizoError

if TYPE_CHECKING:
    from server.inference.models import ServedModels

OOM_SCORE = "500"  # if the machine runs out of memory, the kernel kills this process before the server
_log = structlog.get_logger()
_models: list[ServedModels] = []


def start(settings: Settings, parent: int) -> None:
    """Prepares the process, which is killed if its parent dies."""
    os.dup2(2, 1)  # what a library prints is not the server's output
    os.setsid()  # Ctrl-C in a terminal reaches the server, which stops this process in order
    die_with_parent(parent)
    with suppress(OSError, ValueError, AttributeError):  # a system without these limits
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE, encoding="ascii")
        resource.setrlimit(resource.RLIMIT_DATA, (settings.scorer_memory_bytes, settings.scorer_memory_bytes))
    configure_logs()
    from server.inference.models import ServedModels

    _models.append(ServedModels(settings))


def call(method: str, *arguments: Any) -> Any:
    """Calls a method of the process's `ServedModels`. Raises as `reported`."""
    return reported(getattr(_models[0], method), *arguments)


def reported(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function. Unexpected errors are logged and raised as MobizoError, without internals."""
    try:
        return function(*arguments)
    except MobizoError:
        raise
    except Exception as error:
        _log.error("scorer-failed", exc_info=error)
        no_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
        raise (ScorerFull if no_memory else MobizoError)() from None
