"""Scalar federation over HTTP: a round's updates as trajectories, which the server replays; and who is asked at all."""

import numpy as np
import pytest

from server.storage.store import referenced
from shared.canonical import sha256_hex
from shared.zo.lora import load_adapter
from tests.server.registry.trajectories.runs import Run, complete, finish, send

STEPS, LR, MU = 6, 0.25, 0.5
FACTOR = np.float32(1 - LR * MU)


@pytest.fixture
def trajectory_band(band):
    """A round of two that asks for trajectories of pulled runs."""
    algorithm = {"name": "fedprox", "mu": MU}
    band.begin("alice", "bob", upload="trajectory", training={"steps": STEPS, "lr": LR}, algorithm=algorithm)
    return band


def run_of(lease, directory, start=None, **changes):
    """What a device has after its part: the last B is what counts."""
    seed = lease["job"]["request"]["training"]["seed"]
    settings = {"proximal": MU, "factor": FACTOR} | changes
    return Run(lease, directory, steps=STEPS, best=STEPS, start=start, job_seed=seed, **settings)


def test_two_rounds_of_which_the_server_was_sent_no_b(trajectory_band, tmp_path):
    mean, start = None, None
    for number in (1, 2):
        runs = []
        for user in ("alice", "bob"):
            lease = trajectory_band.lease(user)
            runs.append(run_of(lease, tmp_path, start))
            assert finish(trajectory_band.devices[user], lease, runs[-1])["round"] == number
        assert {part["bytes"] for part in trajectory_band.parts(number).values()} == {len(run.ledger) for run in runs}
        trajectory_band.work()
        begin = np.zeros_like(runs[0].b()) if mean is None else mean
        expected = begin + np.mean([run.b().astype(np.float64) - begin for run in runs], axis=0)
        mean = trajectory_band.b()
        np.testing.assert_allclose(mean, expected, rtol=1e-6, atol=1e-7)
        start = trajectory_band.home.artifacts.read(
            trajectory_band.app.get("/v1/adapters/readers/revisions/main").json()["sha256"]
        )
        assert load_adapter(start, mean.size).tobytes() == mean.tobytes()
        if number == 1:
            trajectory_band.open()


def test_a_trajectory_that_yields_another_b_is_refused_and_b_counts_alone(trajectory_band, tmp_path, problem):
    lease, device = trajectory_band.lease("alice"), trajectory_band.devices["alice"]
    run = run_of(lease, tmp_path)
    send(device, lease, run.ledger).raise_for_status()
    other = run.adapter(STEPS - 1)
    problem(complete(device, lease, other, run.ledger, run.result()), 422, "trajectory-mismatch")
    assert trajectory_band.round()["updates"] == 0
    device.upload(lease, other).raise_for_status()
    assert complete(device, lease, other, None, run.result()).json()["updates"] == 1
    assert trajectory_band.parts()["alice"]["bytes"] == len(other)


def test_what_was_sent_is_not_kept(trajectory_band, tmp_path):
    """Neither a trajectory nor the B that was made of it is named once the round has ended."""
    runs = []
    for user in ("alice", "bob"):
        lease = trajectory_band.lease(user)
        runs.append(run_of(lease, tmp_path))
        finish(trajectory_band.devices[user], lease, runs[-1])
    updates, ledgers = ({sha256_hex(data) for data in files} for files in zip(*map(files_of, runs), strict=True))
    with trajectory_band.home.database.reading() as session:
        assert referenced(session, updates | ledgers) == updates
    trajectory_band.work()
    with trajectory_band.home.database.reading() as session:
        assert referenced(session, updates | ledgers) == set()
    assert trajectory_band.app.get(f"/v1/jobs/{runs[0].job_id}").json()["adapter_version"] is None


def files_of(run):
    return run.adapter(), run.ledger


def test_a_device_whose_owner_did_not_agree_is_not_asked(trajectory_band):
    device = trajectory_band.devices["alice"]
    for capabilities in (None, {}, {"cohorts": False}, {"cohorts": ["others"]}):
        assert device.lease("movies", capabilities=capabilities) is None
    waiting = trajectory_band.app.get(f"/v1/jobs/{trajectory_band.parts()['alice']['job_id']}/waiting").json()
    assert "its owner's permission to take part in cohort readers" in waiting["why"]
    assert device.lease("movies", capabilities={"cohorts": ["readers"]}) is not None
