"""Runs that end early, in both engines."""

import pytest

from device_agent.engines.child_process import NativeEngine, PythonEngine
from device_agent.training.result import out_of_patience
from shared.canonical import file_sha256
from shared.zo.trajectory import Evaluation, Trajectory

# Too low a rate to change any answer or loss: no validation is better than the first.
IDLE = {"steps": 40, "lr": 1e-30, "evaluation_interval": 4, "patience": 3}


@pytest.fixture(params=["native", pytest.param("python", marks=pytest.mark.slow)])
def engine(request):
    if request.param == "native":
        return NativeEngine(request.getfixturevalue("runner_directory"))
    return PythonEngine()


@pytest.mark.parametrize("name", ["rademacher", "gradient"])
def test_a_run_ends_when_its_patience_does(engine, name, request, run, dataset):
    run.begin(request.getfixturevalue(name).plan(dataset, **IDLE))
    result = engine.train(run, lambda _: None, lambda: False).result
    validation_steps = [evaluation.step for evaluation in result.evaluations if evaluation.split == "validation"]
    assert (result.steps, result.best_step, validation_steps) == (12, 0, [0, 4, 8, 12])
    assert result.evaluations[-1].adapter == "best"  # on the test split
    ledger = file_sha256(run.ledger)
    (run.path / "result.json").unlink()  # killed before the result was written
    second_result = engine.train(run, lambda _: None, lambda: False).result
    assert (second_result.steps, second_result.evaluations, file_sha256(run.ledger)) == (12, result.evaluations, ledger)


@pytest.mark.parametrize(
    ("accuracies", "patience", "ends"),
    [
        ((0.5, 0.6, 0.6, 0.5), 2, True),
        ((0.5, 0.6, 0.5, 0.7), 1, False),  # the newest is the best
        ((0.6, 0.5), 2, False),
        ((0.6, 0.5, 0.5), None, False),
        ((), 1, False),
    ],
)
def test_patience_counts_the_validations_after_the_best(accuracies, patience, ends):
    evaluations = [
        Evaluation(step=5 * place, split="validation", correct=round(10 * accuracy), total=10, loss=1.0)
        for place, accuracy in enumerate(accuracies)
    ]
    assert out_of_patience(Trajectory(header=None, evaluations=evaluations), patience) is ends
