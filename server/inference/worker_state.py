"""State that scoring and generation share in the scorer process: cached models, pinned entries and messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import psutil
import structlog

from server.inference.errors import ScorerFull
from server.inference.frames import Batch, ServedAdapterRef, ServedBaseRef
from server.inference.lora_rows import ServedAdapter
from server.inference.model import ServingBase
from server.inference.model_cache import Key, ModelCache, needs
from shared.errors import MobizoError

Send = Callable[[dict[str, Any]], None]
Work = Literal["score", "read", "generate"]
_log = structlog.get_logger()


class MemoryInUse(Exception):
    """The model or adapter does not fit beside those in use; it can be loaded once some are released."""


class WorkerState:
    """The memory of one scorer and the requests that use it. Not thread-safe."""

    def __init__(self, model_cache: ModelCache, send: Send) -> None:
        """send: sends a message to the server."""
        self._model_cache, self._send = model_cache, send
        self._pinned: dict[int, tuple[str, dict[Key, int]]] = {}  # by request: base and bytes of its adapters
        self._process = psutil.Process()
        self.texts: Callable[[], tuple[int, int]] = lambda: (0, 0)  # (waiting, generating), for reports

    # Memory

    def pin(self, number: int, base: ServedBaseRef, adapters: Iterable[ServedAdapterRef]) -> None:
        """Keeps these in memory until the request is unpinned."""
        self._pinned[number] = (base.sha256, needs(adapters))

    def unpin(self, number: int) -> None:
        """Releases the entries of a finished request."""
        self._pinned.pop(number, None)

    def fits(self, sizes: Mapping[Key, int]) -> bool:
        """Whether entries of these sizes fit beside the pinned ones."""
        together = dict(sizes)
        for _, pinned in self._pinned.values():
            together |= pinned
        return sum(together.values()) <= self._model_cache.adapters.limit

    def base(self, ref: ServedBaseRef) -> ServingBase:
        """Returns a base model. Raises NotNow, or as `ModelCache.base`."""
        try:
            return self._model_cache.base(ref, {ref.sha256, *(base for base, _ in self._pinned.values())})
        except ScorerFull as error:
            raise (MemoryInUse() if self._pinned else error) from error

    def adapter(self, ref: ServedAdapterRef, beside: Iterable[Key] = ()) -> ServedAdapter:
        """Returns an adapter without evicting `beside`. Raises NotNow, or as `ModelCache.adapter`."""
        keys = {key for _, pinned in self._pinned.values() for key in pinned}
        try:
            return self._model_cache.adapter(ref, {*beside, *keys})
        except ScorerFull as error:
            raise (MemoryInUse() if keys else error) from error

    # Messages

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message about a request."""
        self._send(message)

    def fail(self, number: int, error: Exception) -> None:
        """Ends a request with a problem. Unexpected errors are logged and reported without internals."""
        if not isinstance(error, MobizoError):
            _log.error("scorer-failed", exc_info=error)
        problem = (error if isinstance(error, MobizoError) else MobizoError()).problem()
        self._send({"id": number, "problem": problem})

    def report(self, work: Work, lengths: Sequence[int], adapters: Sequence[object], began: float) -> None:
        """Reports a batch that began at `began`. lengths: tokens of each row. adapters: adapter of each row."""
        base_cache, adapter_cache = self._model_cache.bases, self._model_cache.adapters
        waiting, generating = self.texts()
        batch = Batch(
            work=work,
            rows=len(lengths),
            tokens=len(lengths) * max(lengths),
            adapters=len({id(adapter) for adapter in adapters if adapter is not None}),
            seconds=time.perf_counter() - began,
            held_adapters=sum(key[0] == "b" for key in adapter_cache.ordered_keys()),
            held_adapter_bytes=adapter_cache.nbytes,
            held_bases=len(base_cache),
            held_base_bytes=base_cache.nbytes,
            evicted_adapters=adapter_cache.evicted,
            evicted_bases=base_cache.evicted,
            waiting_texts=waiting,
            generating_texts=generating,
            rss_bytes=self._process.memory_info().rss,
        )
        self._send(batch.model_dump())
