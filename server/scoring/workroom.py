"""What all work of the scorer shares: its memory, who needs which part of it for longer, and its words to the server.

Knows neither batches nor sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]  # the package ships no types
import structlog

from server.compiler.lora_rows import ServedAdapter
from server.compiler.serving import ServingBase
from server.scoring.errors import ScorerFull
from server.scoring.frames import Batch, ServedAdapterRef, ServedBaseRef
from server.scoring.holdings import Holdings, Key, needs
from shared.errors import MobizoError

Send = Callable[[dict[str, Any]], None]
Work = Literal["score", "read", "grow"]
_log = structlog.get_logger()


class NotNow(Exception):
    """What is asked for does not fit beside what stays in memory for a while."""


class Workroom:
    """The memory of one scorer, and who works in it. Used by one thread."""

    def __init__(self, holdings: Holdings, send: Send) -> None:
        """send: tells the server something."""
        self._holdings, self._send = holdings, send
        self._pinned: dict[int, tuple[str, dict[Key, int]]] = {}  # by request: its base, and what its adapters take
        self._process = psutil.Process()
        self.texts: Callable[[], tuple[int, int]] = lambda: (0, 0)  # that wait, and that grow; for reports

    # What stays in memory

    def pin(self, number: int, base: ServedBaseRef, adapters: Iterable[ServedAdapterRef]) -> None:
        """A request needs these until it is over."""
        self._pinned[number] = (base.sha256, needs(adapters))

    def unpin(self, number: int) -> None:
        """A request is over."""
        self._pinned.pop(number, None)

    def fits(self, sizes: Mapping[Key, int]) -> bool:
        """Whether what takes these bytes has room beside what stays."""
        together = dict(sizes)
        for _, pinned in self._pinned.values():
            together |= pinned
        return sum(together.values()) <= self._holdings.adapters.limit

    def base(self, ref: ServedBaseRef) -> ServingBase:
        """A base model. Raises NotNow, or as `Holdings.base`."""
        try:
            return self._holdings.base(ref, {ref.sha256, *(base for base, _ in self._pinned.values())})
        except ScorerFull as error:
            raise (NotNow() if self._pinned else error) from error

    def adapter(self, ref: ServedAdapterRef, beside: Iterable[Key] = ()) -> ServedAdapter:
        """An adapter, while what is `beside` stays too. Raises NotNow, or as `Holdings.adapter`."""
        keys = {key for _, pinned in self._pinned.values() for key in pinned}
        try:
            return self._holdings.adapter(ref, {*beside, *keys})
        except ScorerFull as error:
            raise (NotNow() if keys else error) from error

    # What is told

    def tell(self, message: dict[str, Any]) -> None:
        """Says something of a request."""
        self._send(message)

    def fail(self, number: int, error: Exception) -> None:
        """Ends a request with a problem; what is unexpected is logged, and told without its internals."""
        if not isinstance(error, MobizoError):
            _log.error("scorer-failed", exc_info=error)
        problem = (error if isinstance(error, MobizoError) else MobizoError()).problem()
        self._send({"id": number, "problem": problem})

    def report(self, work: Work, lengths: Sequence[int], adapters: Sequence[object], began: float) -> None:
        """Says what a batch of texts of these lengths and adapters was that began at `began`."""
        bases, held = self._holdings.bases, self._holdings.adapters
        waiting, growing = self.texts()
        batch = Batch(
            work=work,
            rows=len(lengths),
            tokens=len(lengths) * max(lengths),
            adapters=len({id(adapter) for adapter in adapters if adapter is not None}),
            seconds=time.perf_counter() - began,
            held_adapters=sum(key[0] == "b" for key in held.held()),
            held_adapter_bytes=held.nbytes,
            held_bases=len(bases),
            held_base_bytes=bases.nbytes,
            evicted_adapters=held.evicted,
            evicted_bases=bases.evicted,
            waiting_texts=waiting,
            growing_texts=growing,
            rss_bytes=self._process.memory_info().rss,
        )
        self._send(batch.model_dump())
