"""Many adapters in one batch, against transformers with peft: every architecture, recipes of many kinds at once."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.inference.continuous_batching import BatchedText, ContinuousBatch, cache_bytes
from server.inference.lora_rows import Projections, ServedAdapter, family_of
from server.inference.model import ScoredText, ServingBase
from shared.errors import Untrusted
from shared.zo.lora import a_fingerprint, flat_size
from tests.server.compiler.conftest import ADAPTED, CONFIGS, VOCABULARY, make_architecture, softcapped
from tests.server.peft_directory import write_peft

TOLERANCE = 1e-3  # nats
RECIPES = (  # beside the architecture's own: other ranks, scales, targets, layers and A
    {},
    {},  # the same family again, another B
    {"rank": 7, "alpha": 3},
    {"targets": ("q_proj",), "layers": "last:1"},
    {"a_seed": 9},
)
assert softcapped  # importing conftest registered the attention that Gemma needs


class Served:
    """A base that serves, adapters of RECIPES on it, and the stock models that they are in."""

    def __init__(self, name, directory):
        self.tiny = make_architecture(directory / "base", name)
        self.base = ServingBase(load_checkpoint(str(self.tiny.directory)))
        self.adapters, self.stock = [], [self.tiny.model]
        by_family, random = {}, np.random.default_rng(3)
        for number, settings in enumerate(RECIPES):
            recipe = self.tiny.recipe(**(ADAPTED[name] | settings))
            shape = self.base.facts
            flat = random.normal(0, 0.3, flat_size(recipe, shape)).astype(np.float32)
            projections = by_family.setdefault(family_of(recipe, shape), Projections(recipe, shape))
            self.adapters.append(ServedAdapter(projections, flat))
            write_peft(recipe, shape, flat, a_fingerprint(recipe, shape), directory / str(number))
            model = AutoModelForCausalLM.from_pretrained(self.tiny.directory)
            if name == "gemma3_text":
                model.set_attn_implementation("softcapped")
            self.stock.append(PeftModel.from_pretrained(model, directory / str(number)).eval())

    def adapter_and_model(self, number):
        """(adapter, stock model); 0: the base alone."""
        return (None if number == 0 else self.adapters[number - 1]), self.stock[number]


@pytest.fixture(scope="module", params=list(CONFIGS))
def served_models(request, tmp_path_factory):
    return Served(request.param, tmp_path_factory.mktemp(request.param))


@torch.no_grad()
def stock_score(model, prompt, answer):
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0].double()
    chances = torch.log_softmax(logits, dim=-1)
    return sum(float(chances[len(prompt) - 1 + at, token]) for at, token in enumerate(answer))


def test_a_batch_of_all_adapters_scores_as_each_does_in_peft(served_models):
    random = np.random.default_rng(1)
    texts, expected = [], []
    # Adapters come in turns, some more often than others, each row of another length.
    for row, number in enumerate([0, 1, 2, 3, 4, 5, 1, 2, 1, 0, 5, 3]):
        adapter, model = served_models.adapter_and_model(number)
        prompt = random.integers(0, VOCABULARY, 1 + row).tolist()
        answers = [[int(random.integers(VOCABULARY))], random.integers(0, VOCABULARY, 3).tolist()]
        single = ScoredText(prompt, len(prompt) - 1, [answers[0]], adapter)
        several = ScoredText([*prompt, *answers[1][:-1]], len(prompt) - 1, [answers[1]], adapter)
        texts += [single, several]
        expected += [[stock_score(model, prompt, answer)] for answer in answers]
    scores = served_models.base.score(texts)
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=0)
    # The adapters matter: what is compared is no base model five times.
    assert (
        np.ptp([served_models.base.score([ScoredText([1, 2, 3], 2, [[4]], each)]) for each in served_models.adapters])
        > 0.05
    )


def test_several_answers_share_a_text(served_models):
    adapter, model = served_models.adapter_and_model(2)
    (scores,) = served_models.base.score([ScoredText([5, 6, 7], 2, [[token] for token in range(10)], adapter)])
    np.testing.assert_allclose(scores, [stock_score(model, [5, 6, 7], [token]) for token in range(10)], atol=TOLERANCE)


@torch.no_grad()
def stock_text(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_texts_that_come_and_go_grow_as_in_peft(served_models):
    continuous_batch, tokens_of = ContinuousBatch(served_models.base), {}
    random = np.random.default_rng(2)
    prompts = {number: random.integers(0, VOCABULARY, 3 + 2 * number).tolist() for number in range(6)}
    lengths = {number: 6 + number % 3 for number in prompts}

    def admit(*numbers):
        texts = [
            BatchedText(
                number,
                prompts[number],
                len(prompts[number]) + lengths[number],
                served_models.adapter_and_model(number)[0],
            )
            for number in numbers
        ]
        collect(continuous_batch.admit(texts))

    def collect(logits):
        for number, row in logits.items():
            tokens_of.setdefault(number, []).append(int(row.argmax()))
        continuous_batch.drop({number for number, tokens in tokens_of.items() if len(tokens) == lengths[number]})

    admit(3, 0, 5)
    waiting = [(1, 4), (2,)]
    while continuous_batch.texts:
        collect(continuous_batch.follow({text.name: tokens_of[text.name][-1] for text in continuous_batch.texts}))
        if waiting:
            admit(*waiting.pop(0))
    expected = {
        number: stock_text(served_models.adapter_and_model(number)[1], prompts[number], lengths[number])
        for number in prompts
    }
    assert tokens_of == expected


def test_only_the_registered_files_are_a_base(tmp_path):
    tiny = make_architecture(tmp_path / "base", "llama")
    sha256 = tiny.recipe().base.sha256
    assert ServingBase.open(str(tiny.directory), sha256).facts.sha256 == sha256
    config = json.loads((tiny.directory / "config.json").read_text())
    (tiny.directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(Untrusted):
        ServingBase.open(str(tiny.directory), sha256)


def test_memory_is_what_it_is_told_to_be(served_models):
    facts = served_models.base.facts
    assert served_models.base.nbytes >= 4 * facts.parameters
    continuous_batch = ContinuousBatch(served_models.base)
    continuous_batch.admit([BatchedText(name, [1, 2, 3], 9 + name, None) for name in range(3)])
    cached_bytes = sum(cache.keys.nbytes + cache.values.nbytes for cache in continuous_batch._caches)
    assert cached_bytes == cache_bytes(facts, [9, 10, 11])
    continuous_batch.drop({0, 1, 2})
    assert not continuous_batch._caches
