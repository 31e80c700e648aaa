"""Many adapters in one batch, against transformers with peft: every architecture, recipes of many kinds at once."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.inference.lora_rows import Projections, ServedAdapter
from server.inference.model import ServingBase, TextBatch
from server.inference.texts import ServedAdapterRef, Text
from shared.errors import Untrusted
from shared.zo.encoding import Row
from shared.zo.lora import BaseShape, a_fingerprint, flat_size
from shared.zo.packing import ScoringPlan
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


def shape_of(facts):
    return BaseShape(**{name: getattr(facts, name) for name in BaseShape.model_fields})


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
            family = ServedAdapterRef("", recipe, shape_of(shape)).family
            projections = by_family.setdefault(family, Projections(recipe, shape))
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


def score(served_models, rows):
    """rows: (prompt, answers, adapter). Returns the log-probability of each answer, by row."""
    plans = [ScoringPlan.of([Row(prompt, answer) for answer in answers], restrict=False) for prompt, answers, _ in rows]
    texts = [Text(reading.tokens, None, reading.picks) for plan in plans for reading in plan.readings]
    adapters = [row[-1] for row, plan in zip(rows, plans, strict=True) for _ in plan.readings]
    picked = iter(served_models.base.score(texts, adapters))
    return [plan.scores([next(picked) for _ in plan.readings]) for plan in plans]


def test_a_batch_of_all_adapters_scores_as_each_does_in_peft(served_models):
    random = np.random.default_rng(1)
    rows, expected = [], []
    # Adapters come in turns, some more often than others, each row of another length.
    for row, number in enumerate([0, 1, 2, 3, 4, 5, 1, 2, 1, 0, 5, 3]):
        adapter, model = served_models.adapter_and_model(number)
        prompt = tuple(random.integers(0, VOCABULARY, 1 + row).tolist())
        answers = [(int(random.integers(VOCABULARY)),), tuple(random.integers(0, VOCABULARY, 3).tolist())]
        rows.append((prompt, answers, adapter))
        expected.append([stock_score(model, prompt, answer) for answer in answers])
    np.testing.assert_allclose(score(served_models, rows), expected, atol=TOLERANCE, rtol=0)
    alone = [score(served_models, [((1, 2, 3), [(4,)], adapter)]) for adapter in served_models.adapters]
    assert np.ptp(alone) > 0.05  # the adapters matter


@torch.no_grad()
def stock_text(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_texts_grow_together_as_in_peft(served_models):
    """Six texts of different lengths and adapters, whose prompts are read in two parts, and which end one by one."""
    random = np.random.default_rng(2)
    prompts = [random.integers(0, VOCABULARY, 3 + 2 * number).tolist() for number in range(6)]
    lengths = [6 + number % 3 for number in range(6)]
    served = [served_models.adapter_and_model(number) for number in range(6)]
    texts = [Text(prompt, None, max_tokens=length) for prompt, length in zip(prompts, lengths, strict=True)]
    batch = TextBatch(served_models.base, texts, [adapter for adapter, _ in served], [None] * 6)
    tokens = [[each.token] for each in batch.read(0, 2) + batch.read(2, 6)]
    while rows := [row for row in range(6) if len(tokens[row]) < lengths[row]]:
        for row, each in zip(rows, batch.step(rows), strict=True):
            tokens[row].append(each.token)
    expected = [stock_text(model, *of) for (_, model), *of in zip(served, prompts, lengths, strict=True)]
    assert tokens == expected


def test_only_the_registered_files_are_a_base(tmp_path):
    tiny = make_architecture(tmp_path / "base", "llama")
    sha256 = tiny.recipe().base.sha256
    assert ServingBase.open(str(tiny.directory), sha256).facts.sha256 == sha256
    config = json.loads((tiny.directory / "config.json").read_text())
    (tiny.directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(Untrusted):
        ServingBase.open(str(tiny.directory), sha256)
