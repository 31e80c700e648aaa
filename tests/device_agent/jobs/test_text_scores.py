"""Scores of written texts: by the definitions, and of a whole job by what its adapter writes."""

import json

import pytest

from device_agent.errors import NoRunner, RuntimeFailed, Stopped
from device_agent.inference.samples import write_samples
from device_agent.jobs import text_scores as module
from device_agent.jobs.leased_job import Outcome
from device_agent.jobs.text_scores import rouge_l, text_scores, token_f1
from device_agent.policy.task_approvals import TaskApprovals, TaskState
from shared.task import Task

ENDINGS = ["It was", "was"]
SEQUEL = Task(name="sequel", kind="completion", prompt="{text}", answer=" {endings.text}", metric="token_f1")


@pytest.mark.parametrize(
    ("text", "own", "score"),
    [
        ("police kill the gunman", "Police killed the gunman.", 3 / 4),  # Lin (2004), section 3.1
        ("the gunman kill police", "police killed the gunman", 2 / 4),
        ("the gunman the police killed", "police killed the gunman", 2 * 2 / (5 + 4)),
        ("...", "police", 0.0),
    ],
)
def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(text, own, score):
    assert rouge_l(text, own) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "own", "f1"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("in the year 1889", "1889", 0.5),  # precision 1/3, recall 1
        ("an apple, an apple", "apple", 2 / 3),  # each word counts as often as both have it
        ("Zürich", "zürich?", 1.0),
        ("Paris", "London", 0.0),
        ("", "London", 0.0),
        ("the", "", 1.0),
    ],
)
def test_token_f1_follows_squads_rules(answer, own, f1):
    assert token_f1(answer, own) == pytest.approx(f1)


def test_scores_are_means_and_each_takes_its_best_of_several_right_texts():
    scores = text_scores([("The cat.", ["cat"]), ("a dog", ["my cats bark"])])
    assert scores.model_dump() == {
        "examples": 2, "exact_match": 0.5, "token_f1": 0.5, "rouge_l": pytest.approx(1 / 3), "words": 2, "own_words": 2,
    }  # fmt: skip
    right = [
        "Broncos Denver",  # token F1 1: the words, in another order
        "the Denver team Broncos",  # ROUGE-L 2 * 2 / (2 + 4) over the article, too; token F1 4/5
        "Carolina Panthers",
    ]
    scores = text_scores([("Denver Broncos", right), ("Panthers", ["the Carolina Panthers", "Panthers!"])])
    assert scores.model_dump() == {
        "examples": 2, "exact_match": 0.5, "token_f1": 1.0, "rouge_l": pytest.approx((2 / 3 + 1) / 2), "words": 1.5,
        "own_words": 2.5,
    }  # fmt: skip


@pytest.fixture
def train(daemon, server, rademacher, home, dataset):
    for path in dataset.glob("*.jsonl"):
        records = [json.loads(line) | {"endings": {"text": ENDINGS}} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    TaskApprovals(home.tasks).decide(SEQUEL, ["movies"], TaskState.APPROVED)
    server.add_job(rademacher, task=SEQUEL, steps=3, lr=1.0)

    def run():
        assert daemon.run(once=True).outcome is Outcome.COMPLETED
        return server.completions[-1].result

    return run


def test_a_jobs_result_has_the_scores_of_what_its_adapter_writes(train, home, dataset, rademacher):
    result = train()
    _, texts = write_samples(home, "alice-movies", dataset, 40, rademacher.manifest.recipe.answer_length)
    right = [f" {ending}" for ending in ENDINGS]
    assert result.written_before == text_scores([(each.base, right) for each in texts])
    assert result.written_after == text_scores([(each.adapter, right) for each in texts])
    assert {each.own for each in texts} == {right[0]}
    assert result.written_after.examples == len(texts) > 4


@pytest.mark.parametrize("error", [RuntimeFailed, NoRunner])
def test_a_job_that_cannot_write_keeps_its_adapter_and_says_nothing(train, monkeypatch, error):
    def fail(*_):
        raise error("no runtime")

    monkeypatch.setattr(module, "open_model", fail)
    result = train()
    assert (result.steps, result.written_after) == (3, None)


def test_a_job_killed_between_training_and_scoring_scores_when_it_returns(train, monkeypatch, home, server):
    open_model, calls = module.open_model, []

    def interrupt_once(*arguments):
        calls.append(len(server.completions))
        if len(calls) == 1:
            raise Stopped
        return open_model(*arguments)

    monkeypatch.setattr(module, "open_model", interrupt_once)
    with pytest.raises(AssertionError):
        train()
    interrupted_result = home.run("job-1").result()
    assert interrupted_result.written_after is None
    result = train()
    assert calls == [0, 0]
    assert result.written_after is not None
    later = {"phase_seconds", "written_before", "written_after"}
    assert result.model_dump(exclude=later) == interrupted_result.model_dump(exclude=later)
