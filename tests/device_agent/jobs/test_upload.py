"""What a device sends of a finished run: B, and the trajectory where the job asks and the owner allows it."""

from types import SimpleNamespace

import pytest

from device_agent.inference.adapter_store import AdapterStore
from device_agent.jobs.leased_job import Outcome
from device_agent.jobs.upload import Upload
from device_agent.protocol.client import DeviceClient
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
from tests.device_agent.training.runs import train_in_process

TRAINING = {"steps": 6, "lr": 0.5, "seed": 2**53 - 1, "evaluation_interval": 2}


@pytest.fixture
def result(run, rademacher, dataset):
    """The result of a run that the real trainer made on the real runtime."""
    return train_in_process(run, rademacher.plan(dataset, **TRAINING), rademacher)


@pytest.fixture
def hand_over(enrolled, server, rademacher, run, result):
    """Hands the run in with what may be sent of its trajectory; what the server was asked, in order."""
    policy_run = SimpleNamespace(report=lambda _progress: None, transfer=lambda move: move(None))

    def send(trajectory):
        server.add_job(rademacher, **TRAINING)
        with DeviceClient(server.url, "device-token", enrolled.device_key()) as client:
            lease = client.lease(["movies"])
            waiting = (lambda: None, lambda _seconds: False)
            Upload(client, lease, run, AdapterStore(enrolled), *waiting, trajectory).send(policy_run, result)
        assert server.completions[-1].adapter_sha256 == sha256_hex(run.best.read_bytes())
        return [action for _, action in server.calls if action in ("adapter", "trajectory", "complete")]

    return send


def test_beside_b(server, run, hand_over):
    assert hand_over("beside") == ["trajectory", "adapter", "complete"]
    assert server.trajectories == [run.trajectory.read_bytes()]
    assert server.completions[0].trajectory_sha256 == sha256_hex(run.trajectory.read_bytes())


def test_instead_of_b_if_it_is_smaller(server, run, hand_over):
    smaller = len(run.trajectory.read_bytes()) < len(run.best.read_bytes())
    expected = ["trajectory", "complete"] if smaller else ["trajectory", "adapter", "complete"]
    assert hand_over("instead") == expected


def test_a_torn_tail_stays_here(server, run, hand_over):
    whole = run.trajectory.read_bytes()
    run.trajectory.write_bytes(whole + frame(b"S", 6, bytes(8))[:-1])
    hand_over("beside")
    assert server.trajectories == [whole]


@pytest.mark.parametrize("error", [InvalidTrajectory(), TooLarge()])
def test_a_server_that_does_not_take_it_gets_b_alone(server, hand_over, error):
    server.broken["trajectory"] = [error]
    assert hand_over("beside") == ["trajectory", "adapter", "complete"]
    assert server.completions[0].trajectory_sha256 is None


def test_a_server_that_finds_another_b_gets_b_alone(server, hand_over):
    server.broken["complete"] = [TrajectoryMismatch()]
    assert hand_over("beside") == ["trajectory", "adapter", "complete", "adapter", "complete"]
    assert server.completions[0].trajectory_sha256 is None


def test_a_server_that_cannot_replay_it_gets_both(server, run, hand_over):
    server.broken["complete"] = [NotReplayable()]
    # Smaller than any ledger is not the tiny program's B.
    run.trajectory.write_bytes(run.trajectory.read_bytes()[: len(run.best.read_bytes()) - 1])
    hand_over("instead")
    assert server.uploads == [run.best.read_bytes()]
    assert server.completions[0].trajectory_sha256 == sha256_hex(server.trajectories[-1])


@pytest.mark.parametrize("error", [QuotaExceeded(), TooManyRequests(limit="uploads"), TooSlow(), DigestMismatch()])
@pytest.mark.parametrize("action", ["adapter", "complete"])
def test_a_run_outlasts_what_passes(enrolled, make, server, rademacher, monkeypatch, action, error):
    monkeypatch.setattr("device_agent.jobs.upload.PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("shared.transport.time.sleep", lambda _seconds: None)
    server.broken[action] = [error] * 5  # more than one request repeats by itself
    server.add_job(rademacher, steps=1)
    assert make(enrolled).run(once=True).outcome is Outcome.COMPLETED
    assert not server.failures
    assert server.uploads[-1] == enrolled.run("job-1").best.read_bytes()


def test_a_job_whose_files_cannot_be_had_now_is_released(enrolled, make, server, rademacher, monkeypatch):
    monkeypatch.setattr("shared.transport.time.sleep", lambda _seconds: None)
    server.broken["files"] = [TooManyRequests()] * 9
    server.add_job(rademacher, steps=1)
    assert make(enrolled).run(once=True).outcome is Outcome.RELEASED
    assert not server.failures


@pytest.mark.parametrize(
    ("rules", "trajectory", "expected"),
    [
        ("", "instead", 0),
        ("trajectory = false", "instead", 0),
        ("trajectory = true", "none", 0),
        ("trajectory = true", "beside", 1),
    ],
)
def test_a_trajectory_goes_if_the_owner_allows_it_and_the_job_asks(
    enrolled, make, server, rademacher, rules, trajectory, expected
):
    enrolled.rules.write_text(rules)
    server.add_job(rademacher, trajectory=trajectory, steps=1)
    assert make(enrolled).run(once=True).outcome is Outcome.COMPLETED
    assert server.trajectories == [enrolled.run("job-1").trajectory.read_bytes()] * expected
    assert len(server.uploads) == 1
