"""`client.trajectories` and `mobizo adapter trajectory` against a real server that verified a run."""

import json
from functools import partial

import pytest

from shared.errors import NotFound, RevisionNotFound
from tests.server.registry.trajectories.runs import STEPS, TRAINING, Run, finish

NAME = "alice-movies"


@pytest.fixture
def run(fleet, app, device, tmp_path):
    """The run of version 1, whose trajectory the server has verified."""
    fleet.ready_job(app, training=TRAINING)
    lease = device.lease()
    run = Run(lease, tmp_path)
    finish(device, lease, run)
    return run


@pytest.fixture
def call(command):
    return partial(command, "adapter", "trajectory")


def test_a_trajectory_is_described_and_downloaded(client, run, tmp_path):
    view = client.trajectories.get(NAME)
    assert (view.version, view.steps, view.verified) == (1, STEPS, True)
    reports = []
    target = tmp_path / "new" / "run.bin"
    assert client.trajectories.download(NAME, target, "v1", progress=lambda *report: reports.append(report)) == view
    assert target.read_bytes() == run.ledger
    assert reports[-1] == ("run.bin", view.size, view.size)


def test_absent_trajectories_and_versions(client, fleet, app, device, run):
    with pytest.raises(RevisionNotFound):
        client.trajectories.get(NAME, "v2")
    fleet.ready_job(app)
    device.finish(device.lease())
    with pytest.raises(NotFound):
        client.trajectories.get(NAME, "v2")


def test_the_command(call, run, tmp_path):
    assert f"{STEPS} steps" in call(NAME)
    assert "verified" in call(NAME)
    assert json.loads(call(NAME, "--json"))["verified"] is True
    call(NAME, "--to", tmp_path / "run")
    assert (tmp_path / "run").read_bytes() == run.ledger
    assert "v9" in call(f"{NAME}@v9", exit_code=1)
