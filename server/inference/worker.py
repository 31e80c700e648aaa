"""The work of the scorer's process, one call at a time: batches of texts, and conversations as prompts.

`start` and `call` are what the server has the process run. The server imports this module without torch.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from server.inference.errors import ScorerFull, ScorerStopped
from server.inference.texts import ServedBaseRef, Text
from server.logs import configure_logs
from server.settings import Settings
from server.tasks.child_process import die_with_parent
from shared.chat_template import ChatTemplate, Tools
from shared.errors import MobizoError
from shared.generated_text import GeneratedToken

if TYPE_CHECKING:
    from server.inference.model import TextBatch

OOM_SCORE = "500"  # if the machine runs out of memory, the kernel kills this process before the server
_log = structlog.get_logger()
_worker: list[Worker] = []


def start(settings: Settings, parent: int) -> None:
    """Prepares the process, which is killed if its parent dies."""
    os.dup2(2, 1)  # what a library prints is not the server's output
    os.setsid()  # Ctrl-C in a terminal reaches the server, which stops this process in order
    die_with_parent(parent)
    with suppress(OSError, ValueError, AttributeError):  # a system without these limits
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE, encoding="ascii")
        resource.setrlimit(resource.RLIMIT_DATA, (settings.scorer_memory_bytes, settings.scorer_memory_bytes))
    configure_logs()
    _worker.append(Worker(settings))


def call(method: str, *arguments: Any) -> Any:
    """Calls a method of the process's `Worker`. Raises as `reported`."""
    return reported(getattr(_worker[0], method), *arguments)


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


class Worker:
    """The models and the texts in the memory of one process. Its methods raise the errors of `ModelCache`."""

    def __init__(self, settings: Settings) -> None:
        from server.inference.model_cache import ModelCache
        from server.storage.opening import open_artifacts

        memory = settings.scorer_memory_bytes
        self._models = ModelCache(open_artifacts(settings), memory // 2, memory // 8)
        self._growing: dict[int, TextBatch] = {}

    def pid(self) -> int:
        """Returns the id of this process."""
        return os.getpid()

    def render(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Tools) -> str:
        """Returns a conversation as a prompt. Raises InvalidConversation."""
        return template.render_limited(messages, tools)

    def score(self, base: ServedBaseRef, texts: Sequence[Text]) -> list[list[list[float]]]:
        """Returns the log-probabilities of each text's picks, nats, in one batch."""
        adapters = [self._models.adapter(text.adapter) for text in texts]
        scores: list[list[list[float]]] = self._models.base(base).score(texts, adapters)
        return scores

    def begin(self, number: int, base: ServedBaseRef, texts: Sequence[Text]) -> None:
        """Makes room for texts that are generated together, under a number."""
        from server.inference.model import TextBatch

        adapters = [self._models.adapter(text.adapter) for text in texts]
        constraints = [self._models.constraint(base, text) for text in texts]
        self._growing[number] = TextBatch(self._models.base(base), texts, adapters, constraints)

    def read(self, number: int, start: int, stop: int) -> list[GeneratedToken | MobizoError]:
        """Reads the prompts of some of the texts. Returns the first token after each."""
        texts = self._take(number)
        tokens: list[GeneratedToken | MobizoError] = texts.read(start, stop)
        self._growing[number] = texts
        return tokens

    def generate(self, number: int, rows: Sequence[int]) -> list[GeneratedToken | MobizoError]:
        """Returns the next token of each of these texts and removes others; without any, frees all."""
        texts = self._take(number)
        tokens = texts.step(rows) if rows else []
        if rows:
            self._growing[number] = texts
        return tokens

    def _take(self, number: int) -> TextBatch:
        """Returns texts, which are freed unless they are put back. Raises ScorerStopped if another process had them."""
        texts = self._growing.pop(number, None)
        if texts is None:
            raise ScorerStopped
        return texts
