"""Runs that learn which answers people prefer, by the native runner; the stock model with autograd is the oracle."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from device_agent.training.batch_sampler import BatchSampler
from device_agent.training.run_directory import RunDirectory
from shared.task import Task
from shared.training_settings import TrainingSettings
from tests.device_agent.tiny import WORDS
from tests.device_agent.training.runs import (
    answer_log_p,
    hashes,
    last_b,
    splits_of,
    train,
    train_in_process,
    train_with_kills,
)
from tests.server.compiler import reference

PAIRS = Task(name="style", kind="preference")
LABELLED = Task(name="thumbs", kind="preference", answer="{completion}")
TASKS = {"dpo": PAIRS, "kto": LABELLED}
BETA = 0.5


def records(count, seed):
    rng = np.random.default_rng(seed)
    for index in range(count):
        prompt = " ".join(["the", *rng.permutation(WORDS)[:3]])
        good, bad = " It was great", " It was terrible and dull"
        yield {
            "prompt": prompt,
            "chosen": good,
            "rejected": bad,
            "completion": bad if index % 2 else good,
            "label": index % 2 == 0,
        }


@pytest.fixture
def pairs(tmp_path):
    """A data set whose records are pairs, and have a completion and a label besides."""
    directory = tmp_path / "style"
    directory.mkdir()
    for seed, (split, count) in enumerate((("train", 14), ("validation", 6), ("test", 6))):
        lines = (json.dumps(record) + "\n" for record in records(count, seed))
        (directory / f"{split}.jsonl").write_text("".join(lines))
    return directory


@pytest.fixture(scope="session")
def preferring(compile_tiny):
    def compile_loss(loss):
        settings = {"estimator": "gradient", "layers": "last:1", "queries": 1, "choices": 2, "answer_length": 24}
        return compile_tiny(f"preferring-{loss}", loss=loss, optimizer="sgd", sequence_length=60, **settings)

    return compile_loss


def plan_of(program, loss, directory, **training):
    return program.plan(directory, beta=BETA, **training).model_copy(update={"task": TASKS[loss]})


def logps(model, rows):
    """The log-probability of each row's answer, (rows,), by the stock model."""
    return torch.stack([answer_log_p(model, row).sum() for row in rows])


def first_update(base, program, plan, loss):
    """The first step's gradient (D,) by autograd of the losses of TRL."""
    recipe, shape = program.manifest.recipe, program.manifest.shape
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    splits = splits_of(plan, program)
    order = BatchSampler.of(splits.train, plan.training.seed, recipe.examples_per_step)
    examples = [splits.train[index] for index in order.indices(0)]
    b = torch.zeros(program.manifest.size, requires_grad=True)
    with reference.lora(model, recipe, shape, b):
        own = torch.stack([logps(model, each.rows) for each in examples])
    ratios = own - own.detach()
    if loss == "dpo":
        mean = -torch.nn.functional.logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).mean()
    else:
        signs = torch.tensor([1.0 if each.liked else -1.0 for each in examples])
        mean = (1 - torch.sigmoid(BETA * signs * ratios[:, 0])).mean()
    return torch.autograd.grad(mean, b)[0].numpy()


@pytest.mark.parametrize("loss", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_a_run_learns_what_people_prefer(launcher, base, run, pairs, preferring, tmp_path, loss):
    program = preferring(loss)
    one_step = RunDirectory(tmp_path / "one")
    plan = plan_of(program, loss, pairs, steps=1, lr=1.0)
    one_step.begin(plan)
    train(one_step, launcher)
    expected = first_update(base, program, plan, loss)
    assert np.linalg.norm(last_b(one_step, program) + expected) < 1e-3 * np.linalg.norm(expected)

    run.begin(plan_of(program, loss, pairs, steps=24, lr=0.3 if loss == "dpo" else 1.0, evaluation_interval=8))
    result = train(run, launcher)
    first, *_, last = result.evaluations
    assert (first.split, first.correct, first.margin) == ("test", 0, 0.0)
    assert last.margin == result.preference_margin > 0
    assert result.tuned_accuracy == last.accuracy > 0.6
    assert result.zero_shot_accuracy is None
    assert result.perplexities is None
    assert result.token_loss_after < result.token_loss_before  # of liked answers, which are short and alike
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    examples = splits_of(plan, program).train
    with torch.no_grad():
        expected_references = [logps(model, each.rows).tolist() for each in examples]
    np.testing.assert_allclose(json.loads(run.references_file.read_bytes())["train"], expected_references, rtol=1e-4)


def test_killed_at_every_call_it_ends_with_the_same_bytes(run, pairs, preferring, tmp_path):
    program = preferring("dpo")
    plan = plan_of(program, "dpo", pairs, steps=5, lr=0.3, evaluation_interval=3)
    train_in_process(run, plan, program)
    pieces = RunDirectory(tmp_path / "pieces")
    train_with_kills(pieces, plan, program, longest=23)
    assert hashes(pieces) == hashes(run)
    assert pieces.references_file.read_bytes() == run.references_file.read_bytes()


def test_a_second_row_of_kto_is_the_answer_of_the_record_before(preferring, pairs):
    program = preferring("dpo")
    recipe = program.manifest.recipe.model_copy(update={"loss": "kto"})
    splits = program.splits(pairs, TrainingSettings(), LABELLED, recipe)
    assert {each.liked for each in splits.train} == {True, False}
    for at, example in enumerate(splits.train):
        own, other = example.rows
        assert other.prompt == own.prompt
        assert other.answer == splits.train[at - 1].rows[0].answer
