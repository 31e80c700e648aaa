import pytest
from pydantic import ValidationError

from shared.job import TRANSITIONS, JobRequest, JobState, Progress


def test_every_state_but_the_first_can_be_reached_and_every_open_one_cancelled():
    reached = set().union(*TRANSITIONS.values())
    assert reached | {JobState.QUEUED} == set(JobState)
    assert all(JobState.CANCELLED in moves for state, moves in TRANSITIONS.items() if not state.final)


def test_progress_on_one_line():
    everything = Progress(
        phase="training",
        step=3,
        steps=10,
        loss=0.51234,
        examples_per_second=3.21,
        seconds_left=65.4,
        rss_bytes=123_000_000,
        accuracy=0.7,
        best_accuracy=0.75,
    )
    assert everything.line() == (
        "training  step 3/10  loss 0.512  3.2 samples/s  1:05 left  123 MB  validation 70.0%  best 75.0%"
    )
    assert Progress(phase="loading").line() == "loading"


def test_a_private_job_rejects_patience():
    body = {"base": "b", "user": "u", "adapter": "a", "task": "sst2", "dataset": "d", "training": {"patience": 2}}
    assert JobRequest.model_validate(body).training.patience == 2
    body["privacy"] = {"clip": 1, "noise_multiplier": 1, "sampling_rate": 0.1}
    with pytest.raises(ValidationError, match="cannot end early"):
        JobRequest.model_validate(body)
