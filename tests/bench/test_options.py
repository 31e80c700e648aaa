"""`bench options`: what its table and its claims make of runs."""

import json
import warnings

import pytest

with warnings.catch_warnings():  # ExecuTorch reads its package data the old way
    warnings.simplefilter("ignore")
    from bench.end_to_end_runs import Run, Seen, Track
    from bench.options import compare, slug


@pytest.fixture
def made(monkeypatch):
    """The runs that were not kept already, by name and seed; a run of seed s has accuracies of 0.5 + s/10 and so on."""
    made = []

    def run(track, contender, split, cap, stop, looks):
        seed = contender.training.seed
        made.append((contender.name, seed))
        accuracies = (0.1, 0.5 + seed / 10, 0.8, 0.7)
        seen = [Seen(step=at, core_seconds=at, seconds=at, accuracy=each, loss=1) for at, each in enumerate(accuracies)]
        return Run(
            contender=contender.name,
            seed=seed,
            lr=contender.training.lr,
            split=split,
            steps=100 * (seed + 1),
            core_seconds=60,
            seconds=60,
            examples=1,
            cap=cap,
            seen=seen,
            diverged=contender.name == "fp32",
        )

    monkeypatch.setattr(Track, "_run", run)
    return made


def test_means_over_seeds_and_what_is_kept_is_not_run_again(made, tmp_path):
    words = {"json_file": tmp_path / "o.json", "keep": tmp_path / "keep"}
    compare(**words, only=["ours", "fp32", "q = 4, E = 4"])
    compare(**words, only=["ours", "fp32"], seeds=2)
    assert made == [("ours", 0), ("q = 4, E = 4", 0), ("fp32", 0), ("ours", 1), ("fp32", 1)]
    result = json.loads((tmp_path / "o.json").read_text())
    (table,) = result["tables"]
    ours, broken = table["rows"]
    # Means of 0.5, 0.8, 0.7 and of 0.6, 0.8, 0.7, in percent; their sample standard deviation.
    assert ours == ["ours", 150, pytest.approx((0.6 + 0.3) / 2), pytest.approx(70), pytest.approx(80), *ours[5:]]
    assert ours[5:] == [pytest.approx((200 / 3 + 70) / 2), pytest.approx((10 / 3) / 2**0.5)]
    assert broken[3:] == [0, pytest.approx(80), 0, 0]
    assert result["claims"] == {"accuracy_ours": ours[5], "accuracy_fp32": 0}
    assert len(result["rows"]) == 4


def test_an_option_that_is_none(tmp_path):
    with pytest.raises(SystemExit, match="'q = 16, E = 1'"):
        compare(only=["q = 17"], keep=tmp_path)


def test_names_of_claims():
    assert slug("A from gradients, r = 4") == "a_from_gradients_r_4"
