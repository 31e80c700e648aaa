"""Batches of texts to score, formed from all waiting requests on one base model.

After each batch, a request with remaining texts moves to the end of the queue, so that small requests do not wait for
large ones.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from server.inference.frames import ScoreTask, ServedAdapterRef, TextToScore
from server.inference.lora_rows import ServedAdapter
from server.inference.model import ScoredText
from server.inference.model_cache import Key, needs
from server.inference.worker_state import MemoryInUse, WorkerState


@dataclass
class _Scoring:
    """A request to score. remaining: indices of the remaining texts, longest first."""

    task: ScoreTask
    remaining: list[int]
    scores: list[list[float]]

    def adapter(self, index: int) -> ServedAdapterRef | None:
        """Returns the adapter of a text, or None."""
        adapter = self.task.texts[index].adapter
        return None if adapter is None else self.task.adapters[adapter]


@dataclass(frozen=True)
class _BatchText:
    """One text of a batch, with its adapter or None."""

    scoring: _Scoring
    index: int
    ref: ServedAdapterRef | None

    @property
    def number(self) -> int:
        """Id of its request."""
        return self.scoring.task.id

    @property
    def text(self) -> TextToScore:
        """The text as requested."""
        return self.scoring.task.texts[self.index]


class Scores:
    """All requests to score. Not thread-safe."""

    def __init__(self, worker: WorkerState, batch_tokens: int) -> None:
        """batch_tokens: maximum tokens of a batch, padding included; a longer text forms its own batch."""
        self._worker, self._batch_tokens = worker, batch_tokens
        self._waiting: OrderedDict[int, _Scoring] = OrderedDict()
        self.stuck = False  # waits for memory that texts being generated use

    @property
    def waiting(self) -> int:
        """Number of remaining texts."""
        return sum(len(scoring.remaining) for scoring in self._waiting.values())

    def add(self, task: ScoreTask) -> None:
        """Queues a request."""
        longest_first = sorted(range(len(task.texts)), key=lambda index: -len(task.texts[index].tokens))
        self._waiting[task.id] = _Scoring(task, longest_first, [[]] * len(task.texts))

    def forget(self, number: int) -> None:
        """Drops a cancelled request."""
        self._waiting.pop(number, None)

    def step(self) -> None:
        """Runs one batch if any text is waiting."""
        self.stuck = False
        if not self._waiting:
            return
        batch, sizes = self._choose()
        try:
            base = self._worker.base(batch[0].scoring.task.base)
        except MemoryInUse:
            self.stuck = True
            return
        except Exception as error:
            self._fail(batch, error)
            return
        ready, texts = self._ready(batch, sizes)
        if not texts:
            return
        began = time.perf_counter()
        try:
            scores = base.score(texts)
        except Exception as error:
            self._fail(ready, error)
            return
        for each, log_p in zip(ready, scores, strict=True):
            each.scoring.scores[each.index] = log_p
            each.scoring.remaining.remove(each.index)
        self._worker.report("score", [len(text.tokens) for text in texts], [text.adapter for text in texts], began)
        for number in dict.fromkeys(each.number for each in ready):
            scoring = self._waiting[number]
            if scoring.remaining:
                self._waiting.move_to_end(number)
            else:
                del self._waiting[number]
                self._worker.send({"id": number, "scores": scoring.scores})

    def _choose(self) -> tuple[list[_BatchText], dict[Key, int]]:
        """Chooses at least one text of one base for a batch; returns them and the bytes of their adapters by key."""
        first = next(iter(self._waiting.values()))
        batch: list[_BatchText] = []
        longest, sizes = 0, dict[Key, int]()
        for scoring in self._waiting.values():
            if scoring.task.base.sha256 != first.task.base.sha256:
                continue
            for index in scoring.remaining:
                length = max(longest, len(scoring.task.texts[index].tokens))
                if batch and length * (len(batch) + 1) > self._batch_tokens:
                    continue  # a shorter one may fit
                ref = scoring.adapter(index)
                more = sizes if ref is None else sizes | needs([ref])
                if batch and not self._worker.fits(more):
                    continue
                batch.append(_BatchText(scoring, index, ref))
                longest, sizes = length, more
        return batch, sizes

    def _ready(self, batch: list[_BatchText], beside: Iterable[Key]) -> tuple[list[_BatchText], list[ScoredText]]:
        """Returns the texts whose adapters can be loaded; fails only the requests whose adapter cannot be loaded."""
        loaded: list[tuple[_BatchText, ServedAdapter | None]] = []
        for each in batch:
            try:
                loaded.append((each, None if each.ref is None else self._worker.adapter(each.ref, beside)))
            except MemoryInUse:
                self.stuck = True
            except Exception as error:
                self._fail([each], error)
        alive = [(each, adapter) for each, adapter in loaded if each.number in self._waiting]
        texts = [ScoredText(each.text.tokens, each.text.start, each.text.answers, adapter) for each, adapter in alive]
        return [each for each, _ in alive], texts

    def _fail(self, batch: list[_BatchText], error: Exception) -> None:
        for number in dict.fromkeys(each.number for each in batch):
            if self._waiting.pop(number, None) is not None:
                self._worker.fail(number, error)
