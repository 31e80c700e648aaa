"""Inference with a device's own adapter: scores candidates and generates tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from device_agent.executors import F32, Executor
from device_agent.executors.choice import LauncherSelector
from device_agent.executors.process import Launcher
from device_agent.executors.program import LoadedProgram
from shared.errors import BadRequest
from shared.generated_text import GeneratedToken
from shared.program import ProgramManifest
from shared.program_inputs import TOKEN_DTYPE
from shared.sampling import Sampler, generated_token, log_softmax
from shared.zo.encoding import Row
from shared.zo.packing import ScoringPlan


def open_inference(
    manifest: ProgramManifest, inference: Path, weights: Path, launcher: Launcher | None = None
) -> InferenceSession:
    """Opens the inference file at `inference` with the base weights at `weights` and B = 0.

    launcher: default: the best one of this machine. Raises RuntimeFailed, NoRunner, DoesNotFit.
    """
    executor = (launcher or LauncherSelector()(manifest)).launch(manifest, inference, weights, resident=True)
    try:
        return InferenceSession(manifest, executor)
    except BaseException:
        executor.close()
        raise


class InferenceSession(LoadedProgram):
    """The inference file of a program, over one B and one text's cache. Each call starts a new text."""

    def __init__(self, manifest: ProgramManifest, executor: Executor) -> None:
        """Starts with B = 0. manifest: of a program with an inference file, which the executor has loaded."""
        super().__init__(manifest, executor)
        self._context = manifest.inference_context or 0
        self._vocabulary = manifest.shape.vocabulary
        self._length, self._picks = manifest.recipe.sequence_length, manifest.recipe.answer_length
        self._text = 0  # number of the text in the cache, so that an earlier text is not continued
        self.load(np.zeros(manifest.size, np.float32))
        self.extend([0], 0, [0])  # the first call packs the weights

    def load(self, flat: F32) -> None:
        """Sets B to a copy of `flat` (D,); a text that is being generated ends."""
        self._text += 1
        super().load(flat)

    def extend(self, tokens: Sequence[int], start: int, picks: Sequence[int]) -> F32:
        """Appends `tokens` at position `start`. Returns the logits (P, V) after the tokens at indices `picks`."""
        inputs = ([tokens], [start], picks)
        return self._call("extend", *(np.array(values, TOKEN_DTYPE) for values in inputs))[0]

    def score(
        self, prompt: Sequence[int], candidates: Sequence[Sequence[int]], *, restrict: bool = False
    ) -> list[float]:
        """Returns log P(candidate | prompt) of each candidate, nats. The prompt is processed once.

        restrict: as loss `candidates` scores, see `ScoringPlan`. Raises BadRequest if the prompt or a candidate is
        empty, has an unknown token, or exceeds the context.
        """
        for candidate in candidates:
            self._check(prompt, len(candidate))
            self._check(candidate, 0)
        self._text += 1
        rows = [Row(tuple(prompt), tuple(candidate)) for candidate in candidates]
        plan = ScoringPlan.of(rows, restrict=restrict)
        first = self._read(prompt)
        log_probabilities = []
        for reading in plan.readings:
            picks, picked = dict(reading.picks), []
            following = self._follow(len(prompt), reading.tokens[len(prompt) :])
            for position, logits in enumerate(chain([first], following), len(prompt) - 1):
                if position in picks:
                    values = log_softmax(logits)
                    picked.append([float(values[token]) for token in picks[position]])
            log_probabilities.append(picked)
        return plan.scores(log_probabilities)

    def generate(
        self, tokens: Sequence[int], max_tokens: int, sampler: Sampler | None = None, likeliest: int | None = None
    ) -> Iterator[GeneratedToken]:
        """Yields up to `max_tokens` tokens that follow `tokens`.

        sampler: default: the most likely token. likeliest: as in `shared.sampling.generated_token`. Raises BadRequest
        if the text exceeds the context, or during generation if another call has started another text.
        """
        self._check(tokens, max_tokens)
        return self._generate(list(tokens), max_tokens, sampler or Sampler(0.0, 1.0, 0), likeliest)

    def _generate(
        self, tokens: list[int], max_tokens: int, sampler: Sampler, likeliest: int | None
    ) -> Iterator[GeneratedToken]:
        self._text += 1
        text = self._text
        logits = self._read(tokens)
        for position in range(len(tokens), len(tokens) + max_tokens):
            token = sampler(logits)
            yield generated_token(token, logits, likeliest)
            if text != self._text:
                raise BadRequest("another text replaced this one's cache; generate one text at a time")
            if position < len(tokens) + max_tokens - 1:
                (logits,) = self.extend([token], position, [0])

    def _read(self, tokens: Sequence[int]) -> F32:
        """Processes a text's first tokens; returns the logits (V,) after them."""
        for start in range(0, len(tokens), self._length):
            part = tokens[start : start + self._length]
            rows = self.extend(part, start, [len(part) - 1])
        last: F32 = rows[0]
        return last

    def _follow(self, start: int, tokens: Sequence[int]) -> Iterator[F32]:
        """Yields the logits (V,) after each of a text's tokens from position `start` on."""
        size = min(self._length, self._picks)
        for at in range(0, len(tokens), size):
            part = tokens[at : at + size]
            yield from self.extend(part, start + at, range(len(part)))

    def _check(self, tokens: Sequence[int], max_tokens: int) -> None:
        """Raises BadRequest unless `tokens` are known and leave room for `max_tokens` more, the last of which is never
        processed.
        """
        if not tokens or not all(0 <= token < self._vocabulary for token in tokens):
            raise BadRequest(f"a text must have at least one token, each from 0 to {self._vocabulary - 1}")
        if len(tokens) + max_tokens - 1 > self._context:
            raise BadRequest(
                f"{len(tokens)} tokens and {max_tokens} more exceed the program's context of {self._context} tokens"
            )
