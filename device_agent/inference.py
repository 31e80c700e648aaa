"""A device's own adapter at work: scores answers and goes on with texts, token by token.

Knows tokens and probabilities; knows no tokenizer and not what runs the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from device_agent.errors import RuntimeFailed
from device_agent.runtimes.runner import RunnerInference, serve_command
from shared.errors import BadRequest
from shared.program import ProgramManifest

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


class Extending(Protocol):
    """One text's cache, its adapter, and what comes next (see `shared.program`)."""

    def extend(self, tokens: Sequence[int], start: int, picks: Sequence[int]) -> F32:
        """Puts `tokens` at places `start` and on. Returns the logits (P, V) after the tokens that `picks` counts."""

    def adapter(self) -> F32:
        """A copy of B, (D,)."""

    def load(self, flat: F32) -> None:
        """Makes B a copy of `flat` (D,) and empties the cache."""

    def close(self) -> None:
        """Frees the program's memory."""


def open_inference(manifest: ProgramManifest, inference: Path, weights: Path, runner: Path | None = None) -> Inference:
    """The inference file at `inference` with the base weights at `weights`, B = 0. Raises RuntimeFailed.

    runner: the directory of the native runner, which then runs it; None: ExecuTorch's Python runtime.
    """
    if runner is not None:
        return Inference(manifest, RunnerInference(manifest, serve_command(runner, inference, weights)))
    # ExecuTorch and torch weigh hundreds of megabytes: only a process that runs a program pays for them.
    try:
        from device_agent.runtimes.inference import InferenceRuntime
    except ImportError as error:
        raise RuntimeFailed(
            "neither the native runner nor ExecuTorch for Python is here; `mobizo-agent build-runner` makes the one"
        ) from error
    return Inference(manifest, InferenceRuntime(manifest, inference, weights))


class Inference:
    """One text at a time: each call begins a new one."""

    def __init__(self, manifest: ProgramManifest, runtime: Extending) -> None:
        """Raises BadRequest if the program has no inference file."""
        if manifest.inference_context is None:
            raise BadRequest(f"a program of backend {manifest.recipe.backend} has no inference file; use xnnpack")
        self._context = manifest.inference_context
        self._vocabulary = manifest.shape.vocabulary
        self._length, self._picks = manifest.recipe.sequence_length, manifest.recipe.answer_length
        self._runtime = runtime
        self._text = 0  # counts texts, so that one whose cache is gone is not gone on with

    def load(self, flat: F32) -> None:
        """Makes B a copy of `flat` (D,)."""
        self._text += 1
        self._runtime.load(flat)

    def score(self, prompt: Sequence[int], candidates: Sequence[Sequence[int]]) -> list[float]:
        """log P(candidate | prompt) of each candidate, nats. The prompt is read once, whatever the candidates.

        Raises BadRequest if the prompt or a candidate is empty, has an unknown token, or does not fit the context.
        """
        for candidate in candidates:
            self._check(prompt, len(candidate))
            self._check(candidate, 0)
        self._text += 1
        first = log_softmax(self._read(prompt))
        return [float(first[candidate[0]]) + self._follow(len(prompt), candidate) for candidate in candidates]

    def generate(self, tokens: Sequence[int], most: int, *, temperature: float = 0.0, seed: int = 0) -> Iterator[int]:
        """Up to `most` tokens that follow `tokens`, as they are found; whoever has enough stops asking.

        temperature: divides the logits before a token is drawn, by `seed`; 0 takes the likeliest. Raises BadRequest if
        the text does not fit the context, or, while it goes on, if another call has begun another text.
        """
        if most < 1 or not 0 <= temperature < np.inf:
            raise BadRequest(f"asked for {most} tokens at temperature {temperature}; neither may be below 1 and 0")
        self._check(tokens, most)
        return self._generate(list(tokens), most, temperature, np.random.default_rng(seed))

    def close(self) -> None:
        """Frees the program's memory."""
        self._runtime.close()

    def _generate(self, tokens: list[int], most: int, temperature: float, rng: np.random.Generator) -> Iterator[int]:
        self._text += 1
        text = self._text
        logits = self._read(tokens)
        for place in range(len(tokens), len(tokens) + most):
            token = draw(logits, temperature, rng)
            yield token
            if text != self._text:
                raise BadRequest("another text was begun, so this one's cache is gone; generate one text at a time")
            if place < len(tokens) + most - 1:
                (logits,) = self._runtime.extend([token], place, [0])

    def _read(self, tokens: Sequence[int]) -> F32:
        """The logits (V,) after a text's first tokens, all of which go into the cache."""
        for start in range(0, len(tokens), self._length):
            part = tokens[start : start + self._length]
            rows = self._runtime.extend(part, start, [len(part) - 1])
        last: F32 = rows[0]
        return last

    def _follow(self, start: int, candidate: Sequence[int]) -> float:
        """log P of a candidate's tokens after its first, which lies at place `start`."""
        size, total = min(self._length, self._picks), 0.0
        for at in range(0, len(candidate) - 1, size):
            part = candidate[at : min(at + size, len(candidate) - 1)]
            rows = log_softmax(self._runtime.extend(part, start + at, range(len(part))))
            total += sum(float(row[token]) for row, token in zip(rows, candidate[at + 1 :], strict=False))
        return total

    def _check(self, tokens: Sequence[int], more: int) -> None:
        """Raises BadRequest unless `tokens` are known and leave room for `more`, the last of which is never read."""
        if not tokens or not all(0 <= token < self._vocabulary for token in tokens):
            raise BadRequest(f"a text is at least one token, each from 0 to {self._vocabulary - 1}")
        if len(tokens) + more - 1 > self._context:
            raise BadRequest(
                f"{len(tokens)} tokens and {more} more do not fit the program's context, {self._context}; ask for less"
            )


def log_softmax(logits: F32) -> F64:
    """Log-probabilities (..., V), nats."""
    values = logits.astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    shifted: F64 = values - np.log(np.exp(values).sum(axis=-1, keepdims=True))
    return shifted


def draw(logits: F32, temperature: float, rng: np.random.Generator) -> int:
    """A token by its logits (V,) over the temperature; 0: the likeliest, the first of equals."""
    if temperature == 0:
        return int(logits.argmax())
    # The largest of log-probabilities with Gumbel noise is a draw from them.
    return int((logits.astype(np.float64) / temperature + rng.gumbel(size=logits.shape)).argmax())
