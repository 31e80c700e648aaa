"""`mobizo privacy` against a real server."""

import json

import pytest
from typer.testing import CliRunner

from mobizo.cli import app as cli

PRIVACY = {"clip": 0.2, "noise_multiplier": 1.0, "sampling_rate": 0.02}


@pytest.fixture
def call(fleet, operator, monkeypatch):
    monkeypatch.setenv("MOBIZO_SERVER", fleet.url)
    monkeypatch.setenv("MOBIZO_TOKEN", operator.token)
    return lambda *arguments: CliRunner().invoke(cli, ["privacy", *arguments])


def test_what_was_spent_and_what_may_be(call, app):
    app.submit(privacy=PRIVACY, training={"steps": 150})
    assert "no limit" not in call("show", "alice").stdout
    found = json.loads(call("limit", "alice", "--epsilon", "9", "--json").stdout)
    assert (found["budget"], found["runs"]) == (9, 1)
    told = call("show", "alice")
    assert told.exit_code == 0, told.output
    assert "of 9 at delta 1e-05  1 private runs" in told.stdout
    assert f"{found['epsilon']:.3f}" in told.stdout


def test_jobs_without_privacy_are_named(call, app, device, fleet):
    fleet.ready_job(app)
    device.finish(device.lease())
    assert "1 jobs without privacy" in call("show", "alice").stdout


def test_noise_for_an_epsilon_and_the_epsilon_of_a_noise(call):
    found = call("noise", "--epsilon", "8", "--rate", "0.016", "--steps", "150").stdout.split()
    again = call("noise", "--multiplier", found[1], "--rate", "0.016", "--steps", "150").stdout.split()
    assert again == found
    assert float(found[3]) <= 8


@pytest.mark.parametrize(
    ("arguments", "says", "status"),
    [
        (("noise", "--rate", "0.1", "--steps", "5"), "--epsilon or --multiplier", 2),
        (("noise", "--rate", "2", "--steps", "5", "--epsilon", "1"), "sampling_rate: Input should be less than", 2),
        (("noise", "--rate", "1", "--steps", "100000", "--epsilon", "0.001"), "larger epsilon", 1),
        (("limit", "alice", "--epsilon", "-1"), "epsilon: Input should be greater than 0", 2),
        (("limit", "alice", "--epsilon", "1", "--delta", "2"), "delta: Input should be less than", 2),
        (("show", "Not A Name"), "'Not A Name' is no user's name", 1),
        (("limit", "../alice", "--epsilon", "1"), "'../alice' is no user's name", 1),
        (("cohort", "a/b"), "there is no cohort 'a/b'", 1),
        (("cohort", "nothing"), "there is no cohort 'nothing'", 1),
    ],
)
def test_what_cannot_be_asked_is_one_line(call, arguments, says, status):
    refused = call(*arguments)
    assert "Traceback" not in refused.output
    assert says in refused.stderr
    assert refused.exit_code == status
    assert len(refused.stderr.splitlines()) == 1
