"""Runs that learn to write; stock transformers is the oracle for the losses."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.task import Task
from shared.training_settings import TrainingSettings
from tests.device_agent.training.runs import answer_log_p, train

TASK = Task(name="sequel", kind="completion", prompt="{text}", answer=" It was {label}.")
TEXT = Task(name="whole", kind="text")


@pytest.fixture(scope="session")
def writing(compile_tiny):
    """Its answers are long enough for several tokens; conversations and documents would do as well."""
    return compile_tiny(
        "writing", estimator="gradient", layers="last:1", queries=1, choices=1, answer_length=16, sequence_length=48
    )


def stock_loss(base, examples):
    """Mean -log P over all tokens that count, by the stock model."""
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        return -float(torch.cat([answer_log_p(model, example.correct_row) for example in examples]).mean())


@pytest.mark.parametrize("task", [TASK, TEXT], ids=["completion", "text"])
def test_a_run_reports_losses_per_token_and_no_accuracy(launcher, writing, base, run, dataset, task):
    plan = writing.plan(dataset, steps=12, lr=3e-2, evaluation_interval=4).model_copy(update={"task": task})
    run.begin(plan)
    reports = []
    result = train(run, launcher, reports.append)
    test = writing.splits(dataset, plan.training, task).test
    assert result.token_loss_before == pytest.approx(stock_loss(base, test), rel=1e-4)
    assert result.token_loss_after < result.token_loss_before
    assert (result.accuracy_split, result.tuned_accuracy, result.zero_shot_accuracy) == ("test", None, None)
    losses = [evaluation.loss for evaluation in result.evaluations if evaluation.split == "validation"]
    assert result.best_step == 4 * int(np.argmin(losses))
    validation_losses = [progress.validation_loss for progress in reports if progress.validation_loss is not None]
    assert validation_losses[0] == pytest.approx(losses[0], rel=1e-5)


def test_a_document_stays_in_one_split(writing, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": f"{index:03d} " * 30}) + "\n" for index in range(10)))
    splits = writing.splits(tmp_path, TrainingSettings(validation_limit=5), TEXT)
    names = [
        {writing.tokenizer.decode(example.correct_row.answer)[-4:] for example in split}
        for split in (splits.train, splits.validation)
    ]
    assert len(splits.train) > 40
    assert len(splits.validation) == 5
    assert not names[0] & names[1]
