"""Algorithm 1 from the run's directory to its result, on the real runtime."""

from collections import Counter

import numpy as np
import pytest

from device_agent.errors import Diverged, Stopped
from device_agent.training.batch_sampler import BatchSampler
from device_agent.training.evaluation import log_probabilities, split_metrics
from device_agent.training.prefix import STRIDE
from shared.recipe import DEFAULT_EPS
from shared.zo.lora import load_adapter
from shared.zo.noise import query_seeds
from shared.zo.packing import pack_step
from tests.device_agent.training.runs import (
    after_calls,
    count_calls,
    last_b,
    ledger,
    opened,
    train_in_process,
    trained_steps,
)

SETTINGS = {"steps": 9, "lr": 0.5, "schedule": "cosine", "warmup_steps": 2, "seed": 11, "evaluation_interval": 4}


def test_a_run_is_algorithm_1(run, program, dataset):
    """The same steps by hand, on a second runtime, end at the same B."""
    plan = program.plan(dataset, **SETTINGS)
    result = train_in_process(run, plan, program)
    train_split = program.splits(dataset, plan.training).train
    recipe = plan.manifest.recipe
    order, eps = BatchSampler.of(train_split, 11, recipe.effective_batch), DEFAULT_EPS["fp32"]
    runtime = opened(plan)
    # A run computes the frozen layers at each example's own length, and kernels may sum longer rows in another order.
    # A loss of about 6 then differs by a few units in the last place, and a coefficient, which is the difference of two
    # losses times lr / (2 eps q), by 1e-4 at most. B moves by +-1 times each of the q coefficients of a step.
    bound = 1e-4 if "suffix" in plan.manifest.methods else 0
    for step in range(9):
        batch = pack_step([train_split[index] for index in order.indices(step)], recipe, dynamic=True)
        losses, coefficients = runtime.step(
            batch, query_seeds(11, step, recipe.queries), plan.training.lr_at(step), eps
        )
        if recipe.estimator != "directional":  # its slopes are exact, and no losses of perturbed copies give them
            slopes = (losses[: recipe.queries] - losses[recipe.queries :]) / (2 * eps)
            expected = slopes * plan.training.lr_at(step) / recipe.queries
            np.testing.assert_allclose(coefficients, expected, rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(ledger(run).coefficients[step], coefficients, rtol=0, atol=bound)
    np.testing.assert_allclose(last_b(run, program), runtime.adapter(), rtol=0, atol=9 * recipe.queries * bound)
    runtime.close()
    assert result.steps == 9
    assert result.train_examples == 13
    assert result.peak_rss_bytes > 0


def test_evaluations_come_at_the_interval_and_at_both_ends(run, rademacher, dataset):
    program, reports = rademacher, []
    plan = program.plan(dataset, **SETTINGS)
    result = train_in_process(run, plan, program, report=reports.append)
    evaluations = [(item.split, item.step, item.adapter, item.total) for item in result.evaluations]
    assert evaluations == [
        ("test", 0, "current", 7),
        ("validation", 0, "current", 9),
        ("validation", 4, "current", 9),
        ("validation", 8, "current", 9),
        ("validation", 9, "current", 9),
        ("test", result.best_step, "best", 7),
    ]
    assert result.zero_shot_accuracy == result.evaluations[0].accuracy
    assert result.tuned_accuracy == result.evaluations[-1].accuracy
    assert result.accuracy_split == "test"
    assert trained_steps(reports) == list(range(1, 10))
    last = reports[-1]
    assert (last.step, last.steps, last.accuracy) == (9, 9, result.evaluations[-2].accuracy)
    # The best validation is kept, and is what was measured.
    validations = [item for item in result.evaluations if item.split == "validation"]
    best = min(validations, key=lambda item: (-item.accuracy, item.loss, item.step))
    assert result.best_step == best.step
    runtime = opened(plan)
    runtime.load(load_adapter(run.best.read_bytes(), program.manifest.size))
    splits, recipe = program.splits(dataset, plan.training), plan.manifest.recipe
    measured = [
        split_metrics(examples, log_probabilities(runtime, examples, recipe, dynamic=True), recipe)
        for examples in (splits.validation, splits.test)
    ]
    assert (measured[0].correct, measured[0].loss) == (best.correct, best.loss)
    assert measured[1].correct == result.evaluations[-1].correct
    runtime.close()


def test_without_a_test_split_validation_stands_in(run, rademacher, dataset):
    (dataset / "test.jsonl").unlink()
    result = train_in_process(run, rademacher.plan(dataset, steps=2), rademacher)
    assert {item.split for item in result.evaluations} == {"validation"}
    assert result.zero_shot_accuracy == result.evaluations[0].accuracy
    assert result.tuned_accuracy == max(item.accuracy for item in result.evaluations)
    assert result.accuracy_split == "validation"


def test_each_text_passes_the_frozen_layers_once(run, stored, dataset):
    """In full calls of E texts, whatever the splits' batches are; no call runs the whole network."""
    plan = stored.plan(dataset, **SETTINGS)
    runtime = opened(plan)
    made = count_calls(runtime)
    train_in_process(run, plan, stored, runtime=runtime)
    splits, rows = stored.splits(dataset, plan.training), plan.manifest.recipe.effective_batch
    calls, seen = 0, set()
    for texts in (
        {row.tokens for example in splits.test for row in example.rows},
        {row.tokens for example in splits.validation for row in example.rows},
        {example.correct_row.tokens for example in splits.train},
    ):
        by_length = Counter(-(-len(text) // STRIDE) for text in texts - seen)
        calls += sum(-(-count // rows) for count in by_length.values())
        seen |= texts
    assert (made["prefix"], made["suffix"]) == (calls, 9)
    assert (made["step"], made["score"]) == (0, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_divergence_is_an_error_and_never_enters_the_ledger(run, rademacher, dataset, value):
    plan = rademacher.plan(dataset, **SETTINGS)
    runtime = opened(plan)
    step, third = runtime.step, after_calls(3)

    def failing(*arguments):
        losses, coefficients = step(*arguments)
        losses[0] = value if third() else losses[0]
        return losses, coefficients

    runtime.step = failing
    with pytest.raises(Diverged, match=r"training diverged at step 3.*lower lr"):
        train_in_process(run, plan, rademacher, runtime=runtime)
    assert ledger(run).steps == 3
    assert run.result() is None


def test_seconds_add_up_over_processes(run, rademacher, dataset):
    plan = rademacher.plan(dataset, **SETTINGS)
    with pytest.raises(Stopped):
        train_in_process(run, plan, rademacher, after_calls(6))
    first = run.figures()
    assert first.seconds >= first.train_seconds > 0
    result = train_in_process(run, plan, rademacher)
    assert result.train_seconds > first.train_seconds
    assert result.seconds > first.seconds
    assert result.peak_rss_bytes >= first.peak_rss_bytes
