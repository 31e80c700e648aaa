"""What a device sends of a finished run: B, and the trajectory where the job asks and the owner allows it."""

import pytest

from device_agent.jobs.leased_job import Outcome
from shared.canonical import sha256_hex
from shared.errors import (
    DigestMismatch,
    InvalidTrajectory,
    NotReplayable,
    QuotaExceeded,
    TooLarge,
    TooManyRequests,
    TooSlow,
    TrajectoryMismatch,
)
from shared.zo.trajectory import frame

TRAINING = {"steps": 6, "lr": 0.5, "seed": 2**53 - 1, "evaluation_interval": 2}


@pytest.fixture
def work(enrolled, make, server, rademacher):
    """Works on the job under the owner's rules; returns what the server was asked, in order."""

    def work(trajectory, rules="trajectory = true", **training):
        enrolled.rules.write_text(rules)
        server.add_job(rademacher, trajectory=trajectory, **TRAINING | training)
        before = len(server.calls)
        assert make(enrolled).run(once=True).outcome is Outcome.COMPLETED
        assert server.completions[-1].adapter_sha256 == sha256_hex(enrolled.run("job-1").best.read_bytes())
        return [action for _, action in server.calls[before:] if action in ("adapter", "trajectory", "complete")]

    return work


@pytest.fixture
def finished(home):
    """The directory of the job's run."""
    return home.run("job-1")


def test_beside_b_without_a_torn_tail(work, server, finished):
    assert work("beside") == ["trajectory", "adapter", "complete"]
    whole = finished.trajectory.read_bytes()
    assert server.completions[0].trajectory_sha256 == sha256_hex(whole)
    finished.trajectory.write_bytes(whole + frame(b"S", 6, bytes(8))[:-1])
    work("beside")  # what was trained is handed in again
    assert server.trajectories == [whole, whole]


def test_instead_of_b_if_it_is_smaller(work, server, finished):
    few = {"evaluation_interval": 6}  # an evaluation takes a tenth of the tiny B
    assert work("instead", **few) == ["trajectory", "complete"]
    assert len(server.trajectories[0]) < len(finished.best.read_bytes())
    server.broken["complete"] = [NotReplayable()]
    assert work("instead", **few) == ["trajectory", "complete", "adapter", "complete"]
    assert server.uploads[-1] == finished.best.read_bytes()
    assert server.completions[-1].trajectory_sha256 == sha256_hex(server.trajectories[-1])
    assert work("instead", steps=60) == ["trajectory", "adapter", "complete"]  # it is larger


@pytest.mark.parametrize("error", [InvalidTrajectory(), TooLarge()])
def test_a_server_that_does_not_take_it_gets_b_alone(work, server, error):
    server.broken["trajectory"] = [error]
    assert work("beside") == ["trajectory", "adapter", "complete"]
    assert server.completions[0].trajectory_sha256 is None


def test_a_server_that_finds_another_b_gets_b_alone(work, server):
    server.broken["complete"] = [TrajectoryMismatch()]
    assert work("beside") == ["trajectory", "adapter", "complete", "adapter", "complete"]
    assert server.completions[0].trajectory_sha256 is None


@pytest.mark.parametrize("action", ["adapter", "complete"])
def test_a_run_outlasts_what_passes(work, server, monkeypatch, action):
    for name in ("PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS"):
        monkeypatch.setattr(f"device_agent.jobs.upload.{name}", 0.001)
    monkeypatch.setattr("shared.transport.time.sleep", lambda _seconds: None)
    errors = [QuotaExceeded(), TooManyRequests(limit="uploads"), TooSlow(), DigestMismatch()]
    server.broken[action] = [error for error in errors for _ in range(5)]  # more than one request repeats by itself
    assert work("none")[-1] == "complete"
    assert not server.failures


def test_a_job_whose_files_cannot_be_had_now_is_released(enrolled, make, server, rademacher, monkeypatch):
    monkeypatch.setattr("shared.transport.time.sleep", lambda _seconds: None)
    server.broken["files"] = [TooManyRequests()] * 9
    server.add_job(rademacher, steps=1)
    assert make(enrolled).run(once=True).outcome is Outcome.RELEASED
    assert not server.failures


@pytest.mark.parametrize(
    ("rules", "trajectory"), [("", "instead"), ("trajectory = false", "instead"), ("trajectory = true", "none")]
)
def test_no_trajectory_goes_unless_the_owner_allows_it_and_the_job_asks(work, server, rules, trajectory):
    assert work(trajectory, rules) == ["adapter", "complete"]
    assert len(server.uploads) == 1
