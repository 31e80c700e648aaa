"""`mobizo privacy` against a real server."""

import json
from functools import partial

import pytest

PRIVACY = {"clip": 0.2, "noise_multiplier": 1.0, "sampling_rate": 0.02}


@pytest.fixture
def call(operator_command):
    return partial(operator_command, "privacy")


def test_spent_epsilon_and_budget(call, app):
    app.submit(privacy=PRIVACY, training={"steps": 150})
    privacy = json.loads(call("limit", "alice", "--epsilon", "9", "--json"))
    assert (privacy["budget"], privacy["runs"]) == (9, 1)
    output = call("view", "alice")
    assert "of 9 at delta 1e-05  1 private runs" in output
    assert f"{privacy['epsilon']:.3f}" in output


def test_jobs_without_privacy_are_shown(call, app, device, fleet):
    fleet.ready_job(app)
    device.finish(device.lease())
    assert "1 more jobs had no differential privacy" in call("view", "alice")


def test_noise_and_epsilon_are_inverse(call):
    words = call("noise", "--epsilon", "8", "--rate", "0.016", "--steps", "150").split()
    inverse_words = call("noise", "--multiplier", words[1], "--rate", "0.016", "--steps", "150").split()
    assert inverse_words == words
    assert float(words[3]) <= 8


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (("noise", "--rate", "0.1", "--steps", "5"), "either --epsilon or --multiplier", 2),
        (("noise", "--rate", "2", "--steps", "5", "--epsilon", "1"), "sampling_rate: Input should be less than", 2),
        (("noise", "--rate", "1", "--steps", "100000", "--epsilon", "0.001"), "larger epsilon", 1),
        (("limit", "alice", "--epsilon", "-1"), "epsilon: Input should be greater than 0", 2),
        (("limit", "alice", "--epsilon", "1", "--delta", "2"), "delta: Input should be less than", 2),
        (("view", "Not A Name"), "'Not A Name' is not a valid user name", 1),
        (("limit", "../alice", "--epsilon", "1"), "'../alice' is not a valid user name", 1),
        (("cohort", "a/b"), "there is no cohort 'a/b'", 1),
        (("cohort", "nothing"), "cohort 'nothing' does not exist", 1),
    ],
)
def test_errors_are_one_line(call, arguments, message, status):
    error = call(*arguments, exit_code=status)
    assert message in error
    assert len(error.splitlines()) == 1


def test_what_was_spent_on_a_device(call, app, device, fleet):
    fleet.ready_job(app, privacy=PRIVACY, training={"steps": 150})
    assert device.lease() is not None
    call("limit", "alice", "--epsilon", "9")
    output = call("device", device.device_id)
    assert output.startswith("movies  epsilon ")
    assert "of 9 at delta 1e-05  1 private runs for alice" in output
    (privacy,) = json.loads(call("device", device.device_id, "--json"))
    assert (privacy["dataset"], privacy["users"], privacy["budget"]) == ("movies", ["alice"], 9)
    call("device", "device_none", exit_code=1)
