"""Text generation with continuous batching: one batch for each base model, one token for each text in each step."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.inference.continuous_batching import BatchedText, ContinuousBatch, cache_bytes
from server.inference.errors import ScorerFull
from server.inference.frames import GenerateTask, ServedBaseRef
from server.inference.lora_rows import ServedAdapter
from server.inference.model import ServingBase
from server.inference.model_cache import needs
from server.inference.worker_state import MemoryInUse, WorkerState
from shared.sampling import Sampler, generated_token


@dataclass
class Generation:
    """A request to generate. generated: number of tokens so far, the newest of which is `last`."""

    task: GenerateTask
    sampler: Sampler
    adapter: ServedAdapter | None = None
    generated: int = 0
    last: int = 0

    @property
    def most(self) -> int:
        """Maximum length of the whole text, tokens."""
        return len(self.task.text.tokens) + self.task.text.most


@dataclass
class Batch:
    """The texts that are being generated on one base model."""

    ref: ServedBaseRef
    base: ServingBase
    texts: ContinuousBatch
    generations: dict[int, Generation] = field(default_factory=dict)


class Generations:
    """All requests to generate. Not thread-safe."""

    def __init__(self, worker: WorkerState, batch_tokens: int, cache_limit: int) -> None:
        """batch_tokens: prompt tokens read together, padding included. cache_limit: bytes of all keys and values."""
        self._worker, self._batch_tokens, self._cache_limit = worker, batch_tokens, cache_limit
        self._waiting: OrderedDict[int, Generation] = OrderedDict()
        self._batches: dict[str, Batch] = {}  # by sha256 of the base; none is empty

    @property
    def waiting(self) -> int:
        """Number of texts that are not begun."""
        return len(self._waiting)

    @property
    def generating(self) -> int:
        """Number of texts being generated."""
        return sum(len(batch.generations) for batch in self._batches.values())

    def add(self, task: GenerateTask) -> None:
        """Queues a request."""
        sampler = Sampler(task.text.temperature, task.text.top_p, task.text.seed)
        self._waiting[task.id] = Generation(task, sampler)

    def forget(self, number: int) -> None:
        """Drops a cancelled request."""
        self._waiting.pop(number, None)
        for batch in list(self._batches.values()):
            if number in batch.generations:
                self._remove(batch, {number})

    def step(self, *, admit: bool) -> None:
        """Admits waiting texts that fit, if `admit`, and generates one token for each text admitted before."""
        generating = list(self._batches.values())
        if admit and self._waiting:
            self._admit()
        for batch in generating:
            if batch.generations:
                self._step(batch)

    def _admit(self) -> None:
        """Reads the prompts of waiting texts that fit beside the running ones, in order of arrival."""
        first = next(iter(self._waiting.values()))
        ref = first.task.base
        try:
            base = self._worker.base(ref)
        except MemoryInUse:
            return
        except Exception as error:
            self._fail(first, error)
            return
        batch = self._batches.get(ref.sha256) or Batch(ref, base, ContinuousBatch(base))
        entering: list[Generation] = []
        for generation in list(self._waiting.values()):
            if generation.task.base.sha256 != ref.sha256 or not self._fits(batch, [*entering, generation]):
                break
            try:
                generation.adapter = self._adapter(generation)
            except MemoryInUse:
                break
            except Exception as error:
                self._fail(generation, error)
                continue
            del self._waiting[generation.task.id]
            self._worker.pin(generation.task.id, ref, generation.task.adapters)
            entering.append(generation)
        if not entering:
            if not self._batches and first.task.id in self._waiting:
                self._fail(first, ScorerFull("the text does not fit MOBIZO_SCORER_CACHE_BYTES; ask for less"))
            return
        batch.generations |= {generation.task.id: generation for generation in entering}
        self._batches[ref.sha256] = batch
        texts = [BatchedText(each.task.id, each.task.text.tokens, each.most, each.adapter) for each in entering]
        began = time.perf_counter()
        try:
            logits = batch.texts.admit(texts)
        except Exception as error:
            self._fail_batch(batch, error)
            return
        self._worker.report("read", [len(text.tokens) for text in texts], [text.adapter for text in texts], began)
        self._emit(batch, logits)

    def _fits(self, batch: Batch, entering: Sequence[Generation]) -> bool:
        """Whether the last of these fits with the others: prompt tokens, key-value cache and adapter memory."""
        lengths = [len(generation.task.text.tokens) for generation in entering]
        if len(entering) > 1 and max(lengths) * len(entering) > self._batch_tokens:
            return False
        most = {
            other.ref.sha256: (other, [generation.most for generation in other.generations.values()])
            for other in self._batches.values()
        }
        _, most_lengths = most.setdefault(batch.ref.sha256, (batch, []))
        most_lengths += [generation.most for generation in entering]
        if sum(cache_bytes(other.base.facts, sizes) for other, sizes in most.values()) > self._cache_limit:
            return False
        lone = not self._batches and len(entering) == 1  # so that its error names what does not fit
        return lone or self._worker.fits(needs(entering[-1].task.adapters))

    def _adapter(self, generation: Generation) -> ServedAdapter | None:
        number = generation.task.text.adapter
        return None if number is None else self._worker.adapter(generation.task.adapters[number])

    def _step(self, batch: Batch) -> None:
        adapters = [text.adapter for text in batch.texts.texts]
        began = time.perf_counter()
        try:
            logits = batch.texts.follow({number: generation.last for number, generation in batch.generations.items()})
        except Exception as error:
            self._fail_batch(batch, error)
            return
        self._worker.report("generate", [1] * len(adapters), adapters, began)
        self._emit(batch, logits)

    def _emit(self, batch: Batch, logits: Mapping[Hashable, Any]) -> None:
        """Samples and sends the next token of each text; removes finished texts."""
        ended = set()
        for number, generation in batch.generations.items():
            if number not in logits:
                continue
            generation.last = generation.sampler(logits[number])
            generation.generated += 1
            if generation.last in generation.task.text.ends:
                self._worker.send({"id": number, "finish": "stop"})
            else:
                report = generated_token(generation.last, logits[number], generation.task.text.likeliest)
                self._worker.send({"id": number} | report.model_dump(exclude_defaults=True))
                if generation.generated < generation.task.text.most:
                    continue
                self._worker.send({"id": number, "finish": "length"})
            ended.add(number)
        self._remove(batch, ended)

    def _remove(self, batch: Batch, numbers: set[int]) -> None:
        batch.texts.drop(numbers)
        for number in numbers:
            del batch.generations[number]
            self._worker.unpin(number)
        if not batch.generations:
            self._batches.pop(batch.ref.sha256, None)

    def _fail(self, generation: Generation, error: Exception) -> None:
        """Fails a waiting text."""
        del self._waiting[generation.task.id]
        self._worker.fail(generation.task.id, error)

    def _fail_batch(self, batch: Batch, error: Exception) -> None:
        """Fails every text of a batch."""
        self._batches.pop(batch.ref.sha256, None)
        for number in batch.generations:
            self._worker.unpin(number)
            self._worker.fail(number, error)
        batch.generations.clear()
