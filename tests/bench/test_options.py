"""`bench options`: its claims are means over seeds and measurements."""

import json
import warnings

import pytest
import typer

with warnings.catch_warnings():  # ExecuTorch reads its package data the old way
    warnings.simplefilter("ignore")
    from bench.end_to_end.command import options, slug
    from bench.end_to_end.contender_runner import ContenderRunner
    from bench.training.runs import Evaluation, new_run


@pytest.fixture
def new_runs(monkeypatch):
    """Names and seeds of the runs that were not kept already. Accuracies depend on the seed."""
    new_runs = []

    def run(runner, contender, split, cap, stop, evaluation_steps):
        seed = contender.training.seed
        new_runs.append((contender.name, seed))
        accuracies = (0.1, 0.5 + seed / 10, 0.8, 0.7)
        evaluations = [
            Evaluation(step=index, core_seconds=index, seconds=index, accuracy=accuracy, loss=1)
            for index, accuracy in enumerate(accuracies)
        ]
        return new_run(contender, split, cap=cap, evaluations=evaluations, diverged=contender.name == "fp32")

    monkeypatch.setattr(ContenderRunner, "_run", run)
    return new_runs


def test_means_over_seeds_and_what_is_kept_is_not_run_again(new_runs, tmp_path):
    arguments = {"json_file": tmp_path / "o.json", "keep": tmp_path / "keep"}
    options(**arguments, only=["ours", "fp32", "q = 4, E = 4"])
    options(**arguments, only=["ours", "fp32"], seeds=2)
    assert new_runs == [("ours", 0), ("q = 4, E = 4", 0), ("fp32", 0), ("ours", 1), ("fp32", 1)]
    result = json.loads((tmp_path / "o.json").read_text())
    # Means of 0.5, 0.8, 0.7 and of 0.6, 0.8, 0.7, in percent.
    assert result["claims"] == {"accuracy_ours": pytest.approx((200 / 3 + 70) / 2), "accuracy_fp32": 0}
    assert len(result["rows"]) == 4


def test_an_option_that_is_none(tmp_path):
    with pytest.raises(typer.BadParameter, match="q = 16, E = 1"):
        options(only=["q = 17"], keep=tmp_path)


def test_names_of_claims():
    assert slug("A from gradients, r = 4") == "a_from_gradients_r_4"
