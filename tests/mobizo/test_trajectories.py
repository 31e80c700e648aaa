"""`client.trajectories` and `mobizo adapter trajectory` against a real server that verified a run."""

import json
from functools import partial

import numpy as np
import pytest

from mobizo import Client
from shared.errors import NotFound, RevisionNotFound
from shared.zo.lora import load_adapter
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
def client(fleet, app):
    with Client(fleet.url, app.token) as client:
        yield client


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


@pytest.mark.parametrize("step", [0, 7, STEPS])
def test_lora_b_after_a_step_is_that_of_the_replay(client, run, tmp_path, step):
    target = tmp_path / "new" / "b.safetensors"
    assert client.trajectories.download_step(NAME, step, target).version == 1
    np.testing.assert_array_equal(load_adapter(target.read_bytes(), run.size), run.b(step))


def test_absent_trajectories_steps_and_versions(client, fleet, app, device, run, tmp_path):
    with pytest.raises(NotFound):
        client.trajectories.download_step(NAME, STEPS + 1, tmp_path / "b")
    with pytest.raises(RevisionNotFound):
        client.trajectories.get(NAME, "v2")
    fleet.ready_job(app)
    device.finish(device.lease())
    with pytest.raises(NotFound):
        client.trajectories.get(NAME, "v2")
    assert not (tmp_path / "b").exists()


def test_the_command(call, run, tmp_path):
    assert f"{STEPS} steps" in call(NAME)
    assert "verified" in call(NAME)
    assert json.loads(call(NAME, "--json"))["verified"] is True
    call(NAME, "--to", tmp_path / "run")
    assert (tmp_path / "run").read_bytes() == run.ledger
    assert f"v1 after 3 steps -> {tmp_path}" in call(NAME, "--step", 3, "--to", tmp_path / "b").replace("\n", "")
    np.testing.assert_array_equal(load_adapter((tmp_path / "b").read_bytes(), run.size), run.b(3))
    assert "--to" in call(NAME, "--step", 3, exit_code=2)
    assert "v9" in call(f"{NAME}@v9", exit_code=1)
