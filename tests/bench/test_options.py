"""`bench options`: its claims are means over seeds and measurements."""

import json
import warnings

import pytest
import typer

with warnings.catch_warnings():  # ExecuTorch reads its package data the old way
    warnings.simplefilter("ignore")
    from bench.end_to_end.command import options, slug
    from bench.end_to_end.track import Track
    from bench.training.runs import Look, begin


@pytest.fixture
def made(monkeypatch):
    """The runs that were not kept already, by name and seed; a run of seed s has accuracies of 0.5 + s/10 and so on."""
    made = []

    def run(track, contender, split, cap, stop, looks):
        seed = contender.training.seed
        made.append((contender.name, seed))
        accuracies = (0.1, 0.5 + seed / 10, 0.8, 0.7)
        seen = [Look(step=at, core_seconds=at, seconds=at, accuracy=each, loss=1) for at, each in enumerate(accuracies)]
        return begin(contender, split, cap=cap, seen=seen, diverged=contender.name == "fp32")

    monkeypatch.setattr(Track, "_run", run)
    return made


def test_means_over_seeds_and_what_is_kept_is_not_run_again(made, tmp_path):
    words = {"json_file": tmp_path / "o.json", "keep": tmp_path / "keep"}
    options(**words, only=["ours", "fp32", "q = 4, E = 4"])
    options(**words, only=["ours", "fp32"], seeds=2)
    assert made == [("ours", 0), ("q = 4, E = 4", 0), ("fp32", 0), ("ours", 1), ("fp32", 1)]
    result = json.loads((tmp_path / "o.json").read_text())
    # Means of 0.5, 0.8, 0.7 and of 0.6, 0.8, 0.7, in percent.
    assert result["claims"] == {"accuracy_ours": pytest.approx((200 / 3 + 70) / 2), "accuracy_fp32": 0}
    assert len(result["rows"]) == 4


def test_an_option_that_is_none(tmp_path):
    with pytest.raises(typer.BadParameter, match="q = 16, E = 1"):
        options(only=["q = 17"], keep=tmp_path)


def test_names_of_claims():
    assert slug("A from gradients, r = 4") == "a_from_gradients_r_4"
