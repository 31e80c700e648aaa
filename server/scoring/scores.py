"""Texts that wait to be scored, and which of them make the next batch: of all requests on one base, together.

A request whose texts do not fit one batch stands behind the others after each, so that no small one waits for it. Knows
no sockets and no tenants.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from server.compiler.lora_rows import ServedAdapter
from server.compiler.serving import ScoredText
from server.scoring.frames import ScoreTask, ServedAdapterRef, TextToScore
from server.scoring.holdings import Key, needs
from server.scoring.workroom import NotNow, Workroom


@dataclass
class _Scoring:
    """A request. left: indices of the texts that are not done, longest first."""

    task: ScoreTask
    left: list[int]
    scores: list[list[float]]

    def adapter(self, index: int) -> ServedAdapterRef | None:
        """Of a text, if it has one."""
        adapter = self.task.texts[index].adapter
        return None if adapter is None else self.task.adapters[adapter]


@dataclass(frozen=True)
class _Chosen:
    """One text of a batch, with its adapter if it has one."""

    scoring: _Scoring
    index: int
    ref: ServedAdapterRef | None

    @property
    def number(self) -> int:
        """Of its request."""
        return self.scoring.task.id

    @property
    def text(self) -> TextToScore:
        """As it was asked."""
        return self.scoring.task.texts[self.index]


class Scores:
    """Requests to score. Used by one thread."""

    def __init__(self, room: Workroom, batch_tokens: int) -> None:
        """batch_tokens: padding included; a longer text is a batch of its own."""
        self._room, self._batch_tokens = room, batch_tokens
        self._waiting: OrderedDict[int, _Scoring] = OrderedDict()
        self.stuck = False  # for want of memory, until some texts that grow have ended

    @property
    def waiting(self) -> int:
        """Texts that are not done."""
        return sum(len(scoring.left) for scoring in self._waiting.values())

    def add(self, task: ScoreTask) -> None:
        """One more request."""
        longest_first = sorted(range(len(task.texts)), key=lambda index: -len(task.texts[index].tokens))
        self._waiting[task.id] = _Scoring(task, longest_first, [[]] * len(task.texts))

    def forget(self, number: int) -> None:
        """Nobody waits for a request any more."""
        self._waiting.pop(number, None)

    def turn(self) -> None:
        """One batch, if any text waits."""
        self.stuck = False
        if not self._waiting:
            return
        chosen, sizes = self._choose()
        try:
            base = self._room.base(chosen[0].scoring.task.base)
        except NotNow:
            self.stuck = True
            return
        except Exception as error:
            self._fail(chosen, error)
            return
        ready, texts = self._ready(chosen, sizes)
        if not texts:
            return
        began = time.perf_counter()
        try:
            scores = base.score(texts)
        except Exception as error:
            self._fail(ready, error)
            return
        for each, found in zip(ready, scores, strict=True):
            each.scoring.scores[each.index] = found
            each.scoring.left.remove(each.index)
        self._room.report("score", [len(text.tokens) for text in texts], [text.adapter for text in texts], began)
        for number in dict.fromkeys(each.number for each in ready):
            scoring = self._waiting[number]
            if scoring.left:
                self._waiting.move_to_end(number)
            else:
                del self._waiting[number]
                self._room.tell({"id": number, "scores": scoring.scores})

    def _choose(self) -> tuple[list[_Chosen], dict[Key, int]]:
        """Texts of one base that fit one batch, at least one, and what their adapters take; that fits the memory."""
        first = next(iter(self._waiting.values()))
        chosen: list[_Chosen] = []
        longest, sizes = 0, dict[Key, int]()
        for scoring in self._waiting.values():
            if scoring.task.base.sha256 != first.task.base.sha256:
                continue
            for index in scoring.left:
                length = max(longest, len(scoring.task.texts[index].tokens))
                if chosen and length * (len(chosen) + 1) > self._batch_tokens:
                    continue  # a shorter one may fit
                ref = scoring.adapter(index)
                more = sizes if ref is None else sizes | needs([ref])
                if chosen and not self._room.fits(more):
                    continue
                chosen.append(_Chosen(scoring, index, ref))
                longest, sizes = length, more
        return chosen, sizes

    def _ready(self, chosen: list[_Chosen], beside: Iterable[Key]) -> tuple[list[_Chosen], list[ScoredText]]:
        """Those whose adapters can be had; a request one of whose adapters cannot be had fails, and no other."""
        found: list[tuple[_Chosen, ServedAdapter | None]] = []
        for each in chosen:
            try:
                found.append((each, None if each.ref is None else self._room.adapter(each.ref, beside)))
            except NotNow:
                self.stuck = True
            except Exception as error:
                self._fail([each], error)
        alive = [(each, adapter) for each, adapter in found if each.number in self._waiting]
        texts = [ScoredText(each.text.tokens, each.text.start, each.text.answers, adapter) for each, adapter in alive]
        return [each for each, _ in alive], texts

    def _fail(self, chosen: list[_Chosen], error: Exception) -> None:
        for number in dict.fromkeys(each.number for each in chosen):
            if self._waiting.pop(number, None) is not None:
                self._room.fail(number, error)
