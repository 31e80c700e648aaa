"""What makes a batch, and what is held in memory: a scorer whose worker, with a real tiny base, is in this process."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from server.compiler.checkpoints.checkpoint import inspect_base
from server.inference import scorer as scorer_module
from server.inference import worker
from server.inference.errors import ScorerBusy, ScorerFull, ScorerStopped
from server.inference.model import TextBatch
from server.inference.models import ServedModels
from server.inference.scorer import Scorer, ScorerMeters
from server.inference.texts import ServedAdapterRef, ServedBaseRef, Text
from server.storage.opening import open_artifacts
from server.storage.store import Damaged
from shared.errors import MobizoError, TooManyRequests
from shared.recipe import BaseRef, Recipe
from shared.zo.lora import BaseShape, dump_adapter, flat_size
from tests.server.compiler.conftest import make_tiny

BATCH_TOKENS = 40
ADAPTERS = 2  # that fit into memory
DAMAGED = "0" * 64


class LocalScorer(Scorer):
    """A scorer whose worker is in this process, and the batches that it ran."""

    def __init__(self, settings):
        super().__init__(settings, ScorerMeters(CollectorRegistry()))
        self.models, self.batches, self.generated = ServedModels(settings), [], {}

    async def _call(self, method, *arguments):
        await asyncio.sleep(0)
        if texts := self._texts(method, *arguments):
            self.batches.append((method, len(texts), len({text.adapter for text in texts} - {None})))
        return worker.reported(getattr(self.models, method), *arguments)

    def _texts(self, method, *arguments):
        """The texts of a batch."""
        if method == "score":
            return arguments[1]
        if method == "begin":
            self.generated[arguments[0]] = arguments[2]
        if method == "read":
            return self.generated[arguments[0]][slice(*arguments[1:])]
        return [self.generated[arguments[0]][row] for row in arguments[1]] if method == "generate" else ()


class Bench:
    """A scorer, and texts and adapters to ask it for."""

    def __init__(self, directory, settings, monkeypatch):
        self.tiny = make_tiny(directory)
        facts = inspect_base(str(self.tiny.directory))
        self.shape = BaseShape(**{name: getattr(facts, name) for name in BaseShape.model_fields})
        token_bytes = 8 * facts.layers * facts.kv_heads * facts.head_dim
        self.base = ServedBaseRef(facts.sha256, str(self.tiny.directory), 4 * facts.parameters, token_bytes, "")
        self.artifacts = open_artifacts(settings)
        memory = max(2 * self.base.nbytes, 8 * ADAPTERS * self.adapter(0).nbytes)
        monkeypatch.setattr(scorer_module, "BATCH_TOKENS", BATCH_TOKENS)
        self.scorer = LocalScorer(settings.model_copy(update={"scorer_memory_bytes": memory}))
        self.scorer._adapter_bytes = ADAPTERS * self.adapter(0).nbytes
        self.models = self.scorer.models

    def adapter(self, seed, *, nan=False, **settings):
        recipe = Recipe(
            base=BaseRef(name="tiny", sha256=self.base.sha256),
            **{"rank": 2, "answer_length": 1, "choices": 2, "sequence_length": 8} | settings,
        )
        flat = np.random.default_rng(seed).normal(0, 0.5, flat_size(recipe, self.shape)).astype(np.float32)
        if nan:
            flat[:] = 3e38  # finite, as an upload is, but not after a product
        return ServedAdapterRef(self.artifacts.put(dump_adapter(flat, {})), recipe, self.shape)

    async def score(self, *texts, base=None):
        """texts: (tokens, adapter)."""
        texts = [Text(tuple(tokens), adapter, ((len(tokens) - 1, (3, 4)),)) for tokens, adapter in texts]
        async with aclosing(self.scorer.ask("default", base or self.base, texts)) as answers:
            scores = {index: picked async for index, (picked,), _ in answers}
        return [scores[index] for index in range(len(texts))]

    async def generate(self, tokens, count, adapter=None):
        return await self.generated(Text(tuple(tokens), adapter, max_tokens=count))

    async def generated(self, text):
        generated = []
        async with aclosing(self.scorer.ask("default", self.base, [text])) as answers:
            async for _, token, finish in answers:
                generated.append(token.token)
                if finish is not None:
                    break
        return generated

    def run(self, *requests):
        """Asks for all at the same time. Returns the answers, or errors, in their order."""

        async def together():
            return await asyncio.gather(*requests, return_exceptions=True)

        return asyncio.run(together())


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def bench(directory, home, monkeypatch):
    return Bench(directory, home.settings, monkeypatch)


@torch.no_grad()
def base_score(bench, tokens):
    logits = bench.tiny.model(torch.tensor([tokens])).logits[0, -1].double()
    return torch.log_softmax(logits, -1)[[3, 4]].tolist()


def test_adapters_that_do_not_fit_take_turns(bench):
    adapters = [bench.adapter(seed) for seed in range(5)]
    (together,) = bench.run(bench.score(*(([1, 2, 5], adapter) for adapter in adapters)))
    assert [batch[2] for batch in bench.scorer.batches] == [2, 2, 1]
    assert bench.models.adapters.currsize <= bench.models.adapters.maxsize
    for adapter, scores in zip(adapters, together, strict=True):
        np.testing.assert_allclose(bench.run(bench.score(([1, 2, 5], adapter))), [[scores]], atol=1e-5)
    assert np.ptp([scores[0] for scores in together]) > 0.01


def test_texts_of_several_requests_share_a_batch(bench):
    results = bench.run(*(bench.score(([1, 2, number], None)) for number in range(4)))
    assert bench.scorer.batches == [("score", 4, 0)]
    np.testing.assert_allclose(results, [[base_score(bench, [1, 2, number])] for number in range(4)], atol=1e-4)


def test_a_small_request_does_not_wait_for_a_large_one(bench):
    answered = []

    async def note(name, request):
        answered.append((name, len(await request), len(bench.scorer.batches)))

    large = bench.score(*[(list(range(1, 21)), None)] * 20)  # two of them are a batch
    bench.run(note("large", large), note("small", bench.score(([7, 8], None))))
    (first, *_), (last, rows, batches) = answered
    assert (first, last, rows) == ("small", "large", 20)
    assert batches >= 10
    assert max(rows for _, rows, _ in bench.scorer.batches) == 2


def test_what_one_request_lacks_fails_no_other(bench):
    missing, broken = (replace(bench.adapter(1), sha256=sha) for sha in (DAMAGED, bench.artifacts.put(b"no adapter")))
    *failed, base_alone, good = bench.run(
        bench.score(([1, 2], missing), ([1, 3], missing)),
        bench.score(([1, 2], broken)),
        bench.generate([1, 2], 3, missing),
        bench.score(([1, 2], None)),
        bench.score(([1, 2], bench.adapter(4))),
    )
    assert [type(error) for error in failed] == [Damaged] * 3
    np.testing.assert_allclose(base_alone, [base_score(bench, [1, 2])], atol=1e-4)
    assert np.isfinite(good).all()


POISON = 7  # the number of the prompt's token whose text fails


@pytest.mark.parametrize("work", ["begin", "read", "step"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), ScorerStopped()])
def test_a_failure_reaches_its_own_request_only(bench, monkeypatch, work, error):
    """Whichever part of a batch fails, even after tokens of all requests were answered, or the process dies."""
    numbers = (5, POISON, 9)
    texts = {number: Text((1, 2, number), None, max_tokens=6, temperature=1.0, seed=number) for number in numbers}
    alone = {number: bench.run(bench.generated(text))[0] for number, text in texts.items()}
    method, calls = getattr(TextBatch, "__init__" if work == "begin" else work), 0

    def failing(batch, *arguments):
        nonlocal calls
        calls += 1
        batch_texts = arguments[1] if work == "begin" else batch._texts
        if any(text.tokens[2] == POISON for text in batch_texts) and (work != "step" or calls > 2):
            raise error
        return method(batch, *arguments)

    monkeypatch.setattr(TextBatch, method.__name__, failing)
    results = dict(zip(texts, bench.run(*map(bench.generated, texts.values())), strict=True))
    assert isinstance(results.pop(POISON), MobizoError)
    assert results == {number: alone[number] for number in results}
    assert len(alone[5]) == 6


def test_an_adapter_whose_output_is_not_a_number_ends_only_its_own_text(bench):
    alone = bench.run(bench.generate([1, 2, 5], 4, bench.adapter(1)))
    error, good = bench.run(
        bench.generate([1, 2], 4, bench.adapter(2, nan=True)), bench.generate([1, 2, 5], 4, bench.adapter(1))
    )
    assert isinstance(error, MobizoError)
    assert [good] == alone


def test_what_never_fits_is_refused(bench):
    large = bench.adapter(1, rank=64)
    errors = bench.run(bench.score(([1, 2], large)), bench.generate([1, 2], 5, large), bench.generate([1, 2], 50_000))
    assert [type(error) for error in errors] == [ScorerFull] * 3
    (error,) = bench.run(bench.score(([1, 2], None), base=replace(bench.base, nbytes=1 << 60, sha256=DAMAGED)))
    assert isinstance(error, ScorerFull)
    (scores,) = bench.run(bench.score(([1, 2], None)))
    assert len(scores) == 1


def test_texts_wait_for_memory(bench):
    """Three texts where two fit: the third begins when the others have ended, and a later one not before it."""
    adapters = [bench.adapter(seed) for seed in range(4)]
    bench.scorer._text_bytes = 2 * (adapters[0].nbytes + 7 * bench.base.token_bytes)
    texts = bench.run(*(bench.generate([1, 2, 3 + seed], 4, adapter) for seed, adapter in enumerate(adapters)))
    assert [rows for work, rows, _ in bench.scorer.batches if work == "generate"] == [2] * 6
    assert texts == [
        bench.run(bench.generate([1, 2, 3 + seed], 4, adapter))[0] for seed, adapter in enumerate(adapters)
    ]


def test_a_tenant_has_half_of_the_queue(bench, monkeypatch):
    monkeypatch.setattr(scorer_module, "QUEUE_TOKENS", 100)

    async def ask(tenant, tokens):
        text = Text((1,) * tokens, None, ((0, (3,)),))
        async with aclosing(bench.scorer.ask(tenant, bench.base, [text])) as answers:
            _, log_probabilities, _ = await anext(answers)
            return log_probabilities

    first, second, other, third = bench.run(ask("a", 40), ask("a", 20), ask("b", 50), ask("c", 20))
    assert isinstance(second, TooManyRequests)
    assert isinstance(third, ScorerBusy)
    assert len(first) == len(other) == 1
    (alone,) = bench.run(ask("a", 60))  # what fits a request fits the queue
    assert len(alone) == 1
