"""What makes a batch, and what is held in memory: a scheduler with a real tiny base, in this process."""

import numpy as np
import pytest
import torch

from server.compiler.checkpoints.checkpoint import inspect_base
from server.inference.frames import (
    GenerateTask,
    ScoreTask,
    ServedAdapterRef,
    ServedBaseRef,
    TextToGenerate,
    TextToScore,
)
from server.inference.model_cache import ModelCache, needs
from server.inference.scheduler import Scheduler
from server.storage.memory import MemoryArtifacts
from shared.recipe import BaseRef, Recipe
from shared.zo.lora import BaseShape, dump_adapter, flat_size
from tests.server.compiler.conftest import make_tiny

BATCH_TOKENS = 40


class Bench:
    """A scheduler, what it said, and adapters to ask for."""

    def __init__(self, directory, scratch, adapters=2):
        """adapters: how many of them fit into memory."""
        self.tiny = make_tiny(directory)
        facts = inspect_base(str(self.tiny.directory))
        self.shape = BaseShape(**{name: getattr(facts, name) for name in BaseShape.model_fields})
        self.base = ServedBaseRef(sha256=facts.sha256, source=str(self.tiny.directory), nbytes=4 * facts.parameters)
        self.artifacts = MemoryArtifacts(scratch)
        self.messages, self.batches = [], []
        one = needs([self.adapter(0)])
        (b,) = [size for key, size in one.items() if key[0] == "b"]
        self.limit = sum(one.values()) + b * (adapters - 1)
        self.model_cache = ModelCache(self.artifacts, self.base.nbytes, self.limit)
        self.scheduler = Scheduler(self.model_cache, BATCH_TOKENS, 1 << 20, self.collect)

    def collect(self, message):
        (self.batches if message.get("kind") == "batch" else self.messages).append(message)

    def adapter(self, seed, **settings):
        recipe = Recipe(
            base=BaseRef(name="tiny", sha256=self.base.sha256),
            **{"rank": 2, "answer_length": 1, "choices": 2, "sequence_length": 8} | settings,
        )
        flat = np.random.default_rng(seed).normal(0, 0.5, flat_size(recipe, self.shape)).astype(np.float32)
        sha256 = self.artifacts.put(dump_adapter(flat, {}))
        return ServedAdapterRef(sha256=sha256, recipe=recipe, shape=self.shape)

    def ask(self, number, texts, adapters=()):
        """texts: (tokens, adapter's index or None)."""
        task_texts = tuple(
            TextToScore(tokens=tuple(tokens), start=len(tokens) - 1, answers=((3,), (4,)), adapter=adapter)
            for tokens, adapter in texts
        )
        task = ScoreTask(id=number, base=self.base, adapters=tuple(adapters), texts=task_texts)
        self.scheduler.receive(task.model_dump(mode="json"))

    def generate(self, number, tokens, most, adapters=()):
        text = TextToGenerate(
            tokens=tuple(tokens),
            most=most,
            adapter=0 if adapters else None,
            temperature=0,
            top_p=1,
            seed=0,
            ends=(),
        )
        task = GenerateTask(id=number, base=self.base, adapters=tuple(adapters), text=text)
        self.scheduler.receive(task.model_dump(mode="json"))

    def run(self, turns=1000):
        while turns and not self.scheduler.idle:
            self.scheduler.step()
            turns -= 1
            assert self.model_cache.adapters.nbytes <= self.limit

    def answers(self):
        return {message["id"]: message for message in self.messages if "token" not in message}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def bench(directory, tmp_path):
    return Bench(directory, tmp_path / "scratch")


@torch.no_grad()
def base_score(bench, tokens):
    logits = bench.tiny.model(torch.tensor([tokens])).logits[0, -1].double()
    return torch.log_softmax(logits, -1)[[3, 4]].tolist()


def test_adapters_that_do_not_fit_take_turns(bench):
    adapters = [bench.adapter(seed) for seed in range(5)]
    bench.ask(1, [([1, 2, 5], number) for number in range(5)], adapters)
    bench.run()
    together = bench.answers()[1]["scores"]
    assert bench.model_cache.adapters.evicted > 0
    assert [batch["adapters"] for batch in bench.batches] == [2, 2, 1]
    for number in range(5):
        bench.ask(10 + number, [([1, 2, 5], 0)], [adapters[number]])
        bench.run()
        np.testing.assert_allclose(bench.answers()[10 + number]["scores"], [together[number]], atol=1e-5)
    assert np.ptp([scores[0] for scores in together]) > 0.01


def test_texts_of_several_requests_share_a_batch(bench):
    for number in range(4):
        bench.ask(number, [([1, 2, number], None)])
    bench.run()
    assert [batch["rows"] for batch in bench.batches] == [4]
    for number in range(4):
        np.testing.assert_allclose(bench.answers()[number]["scores"], [base_score(bench, [1, 2, number])], atol=1e-4)


def test_a_small_request_does_not_wait_for_a_large_one(bench):
    bench.ask(1, [(list(range(1, 21)), None)] * 20)  # two of them are a batch
    bench.ask(2, [([7, 8], None)])
    bench.run(turns=2)
    assert list(bench.answers()) == [2]
    bench.run()
    assert len(bench.answers()[1]["scores"]) == 20
    assert max(batch["tokens"] for batch in bench.batches) <= BATCH_TOKENS


def test_a_longer_text_than_a_batch_is_a_batch_of_its_own(bench):
    long = [1 + place % 90 for place in range(50)]
    bench.ask(1, [(long, None), ([5, 6], None)])
    bench.run()
    np.testing.assert_allclose(
        bench.answers()[1]["scores"], [base_score(bench, long), base_score(bench, [5, 6])], atol=1e-4
    )
    assert [batch["rows"] for batch in bench.batches] == [1, 1]


def test_what_one_request_lacks_fails_no_other(bench):
    missing_adapter = bench.adapter(1).model_copy(update={"sha256": "0" * 64})
    broken_adapter = bench.adapter(2).model_copy(update={"sha256": bench.artifacts.put(b"no adapter")})
    bench.ask(1, [([1, 2], 0), ([1, 3], 0)], [missing_adapter])
    bench.ask(2, [([1, 2], None)])
    bench.ask(3, [([1, 2], 0)], [broken_adapter])
    bench.ask(4, [([1, 2], 0)], [bench.adapter(4)])
    bench.run()
    answers = bench.answers()
    assert [answers[number]["problem"]["code"] for number in (1, 3)] == ["damaged-file"] * 2
    assert "scores" in answers[2]
    assert "scores" in answers[4]


def test_what_never_fits_is_told(bench):
    bench.ask(1, [([1, 2], 0)], [bench.adapter(1, rank=64)])
    bench.generate(2, [1, 2], 5, [bench.adapter(1, rank=64)])
    bench.generate(3, [1, 2], 5000)
    bench.run()
    assert [bench.answers()[number]["problem"]["code"] for number in (1, 2, 3)] == ["scorer-full"] * 3
    bench.model_cache.bases.limit = 10
    bench.ask(4, [([1, 2], None)])
    bench.run()
    assert bench.answers()[4]["scores"]  # it is in memory already


def test_texts_wait_for_room_to_grow(bench):
    """Three adapters where two fit: the third begins when one of the others has ended."""
    for number in range(3):
        bench.generate(number, [1, 2, 3 + number], 4, [bench.adapter(number)])
    bench.run()
    assert [message["id"] for message in bench.messages if "finish" in message] == [0, 1, 2]
    assert max(batch["rows"] for batch in bench.batches if batch["work"] == "generate") == 2
    tokens = [message["token"] for message in bench.messages if "token" in message and message["id"] == 2]
    alone = len(bench.messages)
    bench.generate(9, [1, 2, 5], 4, [bench.adapter(2)])
    bench.run()
    assert [message["token"] for message in bench.messages[alone:] if "token" in message] == tokens


def test_scores_wait_for_memory_too(bench):
    """Running texts hold all adapter memory: scoring waits for them, and no new text is admitted before it."""
    for number in range(2):
        bench.generate(number, [1, 2, 3 + number], 4, [bench.adapter(number)])
    bench.scheduler.step()
    bench.ask(5, [([1, 2, 5], 0)], [bench.adapter(5)])
    bench.generate(6, [1, 2], 4, [bench.adapter(6)])
    bench.run()
    assert [message["id"] for message in bench.messages if "token" not in message] == [0, 1, 5, 6]
    assert "scores" in bench.answers()[5]


def test_what_is_cancelled_is_not_worked_at(bench):
    bench.ask(1, [([1, 2], None)])
    bench.generate(2, [1, 2], 30)
    bench.generate(3, [1, 2], 3)
    bench.scheduler.receive({"id": 1, "kind": "cancel"})
    bench.scheduler.step()
    bench.scheduler.receive({"id": 2, "kind": "cancel"})
    bench.run()
    assert bench.answers() == {3: {"id": 3, "finish": "length"}}
    assert sum(message.get("id") == 2 for message in bench.messages) <= 2


def test_other_files_are_not_the_base(bench):
    bench.base = bench.base.model_copy(update={"sha256": "f" * 64})
    bench.ask(1, [([1, 2], None)])
    bench.run()
    assert bench.answers()[1]["problem"]["code"] == "base-not-served"
    assert bench.base.source not in str(bench.messages)
