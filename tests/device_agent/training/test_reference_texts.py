"""The loss of public texts before and after a run, by the native runner; the stock model is the oracle."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from device_agent.jobs.leased_job import Outcome
from device_agent.training.run import MAX_READ, reference_examples
from device_agent.training.run_plan import own_texts
from shared.canonical import file_sha256
from shared.privacy import ExamplePrivacy
from shared.recipe import TARGETS
from shared.registry import ApprovalRule
from shared.task import Task
from tests.device_agent.tiny import TASK, VOCABULARY, write_records
from tests.device_agent.training.runs import begun, ledger, train

TEXTS = ("The moon turns around the earth.", "Bread rises because yeast makes gas.", "A glacier is made of snow.")
SEQUEL = Task(name="sequel", kind="completion", prompt="{text}", answer=" It was {label}.")


def measured(run):
    return [each for each in ledger(run).evaluations if each.split == "reference"]


def plan_of(program, dataset, task=TASK, start=None, start_sha256=None, **training):
    facts = {"reference_texts": TEXTS, "task": task, "start": start, "start_sha256": start_sha256}
    return program.plan(dataset, **training).model_copy(update=facts)


@pytest.mark.parametrize("name", ["rademacher", pytest.param("gradient", marks=pytest.mark.slow)])
def test_the_loss_is_that_of_every_token_over_the_whole_vocabulary(request, base, launcher, dataset, run, name):
    """Whatever the program's loss is: `gradient` has the one over candidates."""
    program = request.getfixturevalue(name)
    begun(run.path, plan_of(program, dataset, steps=4, lr=1e-3, evaluation_interval=2))
    result = train(run, launcher)
    before, after = measured(run)
    assert (before.step, before.adapter, after.step, after.adapter) == (0, "current", result.best_step, "best")
    assert result.reference_loss_change == pytest.approx(after.loss / before.loss - 1)
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    recipe, losses = program.manifest.recipe, []
    for text in TEXTS:
        tokens = program.tokenizer.encode(text).ids
        for start in range(1, len(tokens), recipe.answer_length):
            end = min(start + recipe.answer_length, len(tokens))
            first = max(end - 1 - recipe.sequence_length, 0)  # what the program reads ends with the last token but one
            with torch.no_grad():
                log_p = torch.log_softmax(model(torch.tensor([tokens[first : end - 1]])).logits[0], -1)
            losses.append(-sum(float(log_p[at - 1 - first, tokens[at]]) for at in range(start, end)))
    assert before.total == before.correct == len(losses)
    assert before.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.fixture(scope="session")
def wide(compile_tiny):
    """It adapts everything, so that it learns a language and forgets it again."""
    lengths = {"answer_length": 16, "sequence_length": 48, "choices": 1}
    return compile_tiny("wide", estimator="gradient", queries=1, targets=TARGETS, rank=8, **lengths)


def test_a_run_made_to_overfit_is_held_and_a_short_one_is_not(launcher, dataset, wide, tmp_path):
    """The tiny base is random: the run that the others start from teaches it the language of the texts."""
    language = tmp_path / "language"
    language.mkdir()
    for split in ("train", "validation"):
        (language / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    settings = {"steps": 60, "lr": 0.05, "evaluation_interval": 60}
    learned = begun(tmp_path / "learned", plan_of(wide, language, task=Task(name="whole", kind="text"), **settings))
    assert train(learned, launcher).reference_loss_change < -0.5
    write_records(dataset / "train.jsonl", 4, 0)
    start = {"start": learned.best, "start_sha256": file_sha256(learned.best), "task": SEQUEL}
    objections, changes = {}, {}
    for name, training in (("short", {"steps": 2, "lr": 1e-3, "evaluation_interval": 2}), ("overfit", settings)):
        result = train(begun(tmp_path / name, plan_of(wide, dataset, **start, **training)), launcher)
        assert result.token_loss_after < result.token_loss_before
        changes[name], objections[name] = result.reference_loss_change, ApprovalRule().objection(result, None)
    assert changes["short"] < 0.05 < changes["overfit"]
    assert objections["short"] is None
    assert "the loss of the reference texts rose by" in objections["overfit"]


def test_as_many_pieces_are_measured_as_there_is_time_for(rademacher):
    recipe, tokenizer = rademacher.manifest.recipe, rademacher.tokenizer

    def pieces(texts, vocabulary=VOCABULARY, dynamic=True, **changes):
        own = recipe.model_copy(update=changes)
        return reference_examples(texts, tokenizer, own, vocabulary, dynamic=dynamic)

    assert len(own_texts()) == 40
    for answer_length in (1, 6, 24):
        some = pieces(own_texts(), answer_length=answer_length)
        assert MAX_READ - recipe.sequence_length < sum([max(each.length for each in some)] * len(some)) <= MAX_READ
        assert max(len(each.correct_row.targets) for each in some) == answer_length
    assert pieces(own_texts()) == pieces(own_texts())
    assert len(pieces(TEXTS, sequence_length=MAX_READ, dynamic=False)) == 1
    assert pieces(TEXTS, vocabulary=3) == pieces(["x"]) == pieces(()) == []


def test_a_lease_may_have_its_own_texts_and_a_private_job_measures_none(daemon, enrolled, server, rademacher, clipped):
    privacy = ExamplePrivacy(clip=0.5, noise_multiplier=1.0, sampling_rate=0.2)
    jobs = ((rademacher, None, {}), (rademacher, TEXTS, {}), (clipped, TEXTS, {"privacy": privacy}))
    for number, (program, texts, changes) in enumerate(jobs, 1):
        server.reference_texts = texts
        server.add_job(program, job_id=f"job-{number}", steps=2, **changes)
        assert daemon.run(once=True).outcome is Outcome.COMPLETED
        expected = () if changes else texts or own_texts()
        assert enrolled.run(f"job-{number}").plan().reference_texts == expected
        change = server.completions[-1].result.model_dump(mode="json").get("reference_loss_change")
        assert (change is None) == bool(changes)


def test_a_run_keeps_the_texts_that_it_began_with(daemon, enrolled, server, rademacher, dataset):
    plan = plan_of(rademacher, dataset, steps=2)
    server.reference_texts = TEXTS[:1]
    server.add_job(rademacher, steps=2)
    job, _ = server.jobs[0]
    begun(enrolled.run("job-1").path, plan.model_copy(update={"training": job.request.training}))
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    assert enrolled.run("job-1").plan().reference_texts == TEXTS
