import pytest
from pydantic import ValidationError

from shared.job import TRANSITIONS, JobRequest, JobStart, JobState
from shared.result import Result
from shared.zo.trajectory import Evaluation


def test_a_start_is_also_read_as_text():
    whole = {"adapter": "alice-movies", "revision": "v2"}
    assert JobStart.model_validate("alice-movies@v2") == JobStart.model_validate(whole)
    assert JobStart.model_validate("alice-movies").revision == "main"
    for wrong in ("alice-movies@", "@v2", "a@b@c", ""):
        with pytest.raises(ValidationError):
            JobStart.model_validate(wrong)


def test_every_state_but_the_first_can_be_reached_and_every_open_one_cancelled():
    reached = set().union(*TRANSITIONS.values())
    assert reached | {JobState.QUEUED} == set(JobState)
    assert all(JobState.CANCELLED in moves for state, moves in TRANSITIONS.items() if not state.final)


def measured(correct, total):
    test = Evaluation(step=0, split="test", correct=correct, total=total, loss=1)
    validation = Evaluation(step=0, split="validation", correct=1, total=7, loss=1)
    figures = {"steps": 1, "best_step": 1, "train_seconds": 1, "seconds": 1, "peak_rss_bytes": 1}
    return Result(**figures, evaluations=(test, validation), tuned_accuracy=correct / total, accuracy_split="test")


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [(1, 1, 0.2065, 1.0), (8, 10, 0.4902, 0.9433), (0, 20, 0.0, 0.1611), (50, 100, 0.4038, 0.5962)],
)
def test_the_interval_of_an_accuracy_is_wilsons(correct, total, low, high):
    """Bounds from the formula's roots: the p with (p - share)^2 = z^2 p (1 - p) / total, by a search."""
    result = measured(correct, total)
    share = correct / total
    inside = [p / 10_000 for p in range(10_001) if (p / 1e4 - share) ** 2 <= 1.96**2 * p / 1e4 * (1 - p / 1e4) / total]
    assert result.accuracy_interval == (total, pytest.approx(inside[0], abs=2e-4), pytest.approx(inside[-1], abs=2e-4))
    assert result.accuracy_interval[1:] == (pytest.approx(low, abs=2e-4), pytest.approx(high, abs=2e-4))
    assert bool(result.small_split_note) == (total < 30)


def test_without_an_accuracy_there_is_no_interval():
    assert measured(1, 2).model_copy(update={"tuned_accuracy": None}).accuracy_interval is None
    assert measured(1, 2).model_copy(update={"evaluations": ()}).small_split_note == ""


def test_a_private_job_rejects_patience():
    body = {"base": "b", "user": "u", "adapter": "a", "task": "sst2", "dataset": "d", "training": {"patience": 2}}
    assert JobRequest.model_validate(body).training.patience == 2
    body["privacy"] = {"clip": 1, "noise_multiplier": 1, "sampling_rate": 0.1}
    with pytest.raises(ValidationError, match="cannot end early"):
        JobRequest.model_validate(body)
