"""Trajectories over HTTP: taken, replayed, refused, and made into B again."""

import os
import threading
from contextlib import ExitStack
from datetime import timedelta

import numpy as np
import pytest

from server.registry.trajectories import reconstruction
from server.registry.trajectories.service import StoredTrajectory
from server.storage.garbage_collection import Collector
from shared.canonical import sha256_hex
from shared.errors import Unavailable
from shared.zo.trajectory import MAGIC, frame, parse_trajectory
from tests.server.actors import adapter_bytes
from tests.server.homes import at_once
from tests.server.registry.trajectories.runs import BEST, STEPS, TRAINING, Run, complete, finish, send


@pytest.fixture
def lease(fleet, app, device):
    fleet.ready_job(app, training=TRAINING)
    return device.lease()


@pytest.fixture
def run(lease, tmp_path):
    return Run(lease, tmp_path)


def version_url(lease, version=1):
    return f"/v1/adapters/{lease['job']['request']['adapter']}/versions/{version}"


def test_beside_b_it_is_replayed_and_the_version_is_verified(device, app, lease, run):
    assert device.upload(lease, run.adapter()).status_code == 200
    receipt = send(device, lease, run.ledger)
    assert receipt.json() == {"sha256": sha256_hex(run.ledger), "size": len(run.ledger)}
    assert send(device, lease, run.ledger).json() == receipt.json()
    completed = complete(device, lease, run.adapter(), run.ledger, run.result())
    assert completed.status_code == 200, completed.text
    assert completed.json()["verified"] is True
    assert complete(device, lease, run.adapter(), run.ledger, run.result()).json() == completed.json()
    url = version_url(lease)
    assert app.get(url).json()["verified"] is True
    assert app.get(f"{url}/trajectory").json() == {
        "adapter": lease["job"]["request"]["adapter"],
        "version": 1,
        "sha256": sha256_hex(run.ledger),
        "size": len(run.ledger),
        "steps": STEPS,
        "verified": True,
        "replaces_weights": False,
        "start_sha256": None,
    }
    assert app.get(f"{url}/trajectory.bin").content == run.ledger
    assert send(device, lease, run.ledger).status_code == 200


@pytest.mark.parametrize("recipe", [{}, {"estimator": "directional", "queries": 256}], ids=["replay", "directional"])
def test_instead_of_b_the_server_makes_it(fleet, app, device, tmp_path, recipe):
    fleet.ready_job(app, training=TRAINING, recipe=recipe, trajectory="instead")
    lease = device.lease()
    run = Run(lease, tmp_path)
    assert len(run.ledger) < STEPS * (4 * recipe.get("queries", 1) + 13) + 2000  # scalars alone
    version = finish(device, lease, run)
    assert (version["verified"], version["sha256"]) == (True, sha256_hex(run.adapter()))
    assert version["size"] == len(run.adapter())
    assert app.get(f"{version_url(lease)}/lora_B.safetensors").content == run.adapter()


def test_without_one_nothing_is_verified(device, app, lease, problem):
    assert device.finish(lease)["verified"] is False
    url = version_url(lease)
    problem(app.get(f"{url}/trajectory"), 404, "not-found")
    problem(app.get(f"{url}/trajectory.bin"), 404, "not-found")


def flip_coefficient(run, step=10):
    """The ledger with one bit of one coefficient changed, its checksums right."""
    trajectory, _ = parse_trajectory(run.ledger)
    coefficients = trajectory.coefficients[step].view(np.uint32)
    coefficients[0] ^= 1 << 20  # of the mantissa: what is less may be lost in rounding
    return rewrite(trajectory)


def rewrite(trajectory):
    body = b"".join(frame(b"S", step, c.astype("<f4").tobytes()) for step, c in enumerate(trajectory.coefficients))
    return MAGIC + frame(b"H", 0, trajectory.header.model_dump_json().encode()) + body


@pytest.mark.parametrize("with_b", [True, False])
def test_a_flipped_coefficient_is_refused_and_nothing_lost(home, device, app, lease, run, problem, with_b):
    ledger = flip_coefficient(run)
    if with_b:
        device.upload(lease, run.adapter()).raise_for_status()
    send(device, lease, ledger).raise_for_status()
    before = home.stored_files()
    problem(complete(device, lease, run.adapter(), ledger, run.result()), 422, "trajectory-mismatch")
    assert app.get(f"/v1/jobs/{lease['job']['id']}").json()["state"] == "training"
    assert home.stored_files() == before
    # The right one, or B alone, is still as good as before.
    device.upload(lease, run.adapter()).raise_for_status()
    response = complete(device, lease, run.adapter(), None, run.result())
    assert response.json()["verified"] is False
    problem(app.get(f"{version_url(lease)}/trajectory"), 404, "not-found")


def test_a_flip_after_the_best_step_changes_nothing_that_is_published(device, lease, run):
    ledger = flip_coefficient(run, step=BEST)
    device.upload(lease, run.adapter()).raise_for_status()
    send(device, lease, ledger).raise_for_status()
    assert complete(device, lease, run.adapter(), ledger, run.result()).json()["verified"] is True


def test_a_run_that_was_pulled_is_verified_and_no_other_is_taken_for_it(fleet, app, device, tmp_path, problem):
    fleet.ready_job(app, training=TRAINING | {"lr": 0.25, "proximal": 0.5})
    lease = device.lease()
    for mu, factor in ((None, None), (0.25, np.float32(0.9375)), (0.5, np.float32(0.9375))):
        other = Run(lease, tmp_path, proximal=mu, factor=factor)
        problem(send(device, lease, other.ledger), 422, "invalid-trajectory")
    run = Run(lease, tmp_path, proximal=0.5, factor=np.float32(0.875))
    assert finish(device, lease, run)["verified"] is True
    assert app.get(f"{version_url(lease)}/lora_B.safetensors").content == run.adapter()


def test_a_completion_names_what_was_uploaded(device, lease, run, problem):
    device.upload(lease, run.adapter()).raise_for_status()
    problem(complete(device, lease, run.adapter(), run.ledger, run.result()), 409, "conflict")
    send(device, lease, run.ledger).raise_for_status()
    for change in ({"steps": STEPS - 1}, {"best_step": STEPS + 1}):
        result = run.result() | change
        problem(complete(device, lease, run.adapter(), run.ledger, result), 422, "invalid-trajectory")


def test_what_is_no_ledger_of_this_run_is_refused_and_not_kept(fleet, home, device, lease, run, tmp_path, problem):
    before = home.stored_files()
    for change in ({"job_seed": 78}, {"start_sha256": "1" * 64}):
        document = problem(send(device, lease, Run(lease, tmp_path, **change).ledger), 422, "invalid-trajectory")
        assert next(iter(change)) in document["detail"]
    problem(send(device, lease, Run(lease, tmp_path, steps=STEPS + 1).ledger), 422, "invalid-trajectory")
    problem(send(device, lease, run.ledger[:-1]), 422, "invalid-trajectory")
    problem(send(device, lease, run.ledger + bytes(100_000)), 413, "too-large")
    problem(send(fleet.device(name="other"), lease, run.ledger), 404, "not-found")
    problem(send(fleet.actor(device.token), lease, run.ledger), 401, "bad-signature")
    device.post(f"/v1/leases/{lease['id']}/release").raise_for_status()
    problem(send(device, lease, run.ledger), 410, "lease-ended")
    assert home.stored_files() == before


@pytest.mark.parametrize("recipe", [{"noise": "gaussian"}, {"estimator": "stored"}])
def test_what_is_exact_on_its_device_alone_comes_beside_b_and_unverified(fleet, app, device, tmp_path, problem, recipe):
    fleet.ready_job(app, training=TRAINING, recipe=recipe)
    lease = device.lease()
    run = Run(lease, tmp_path)
    send(device, lease, run.ledger).raise_for_status()
    adapter = adapter_bytes(run.size)
    problem(complete(device, lease, adapter, run.ledger, run.result()), 409, "not-replayable")
    device.upload(lease, adapter).raise_for_status()
    assert complete(device, lease, adapter, run.ledger, run.result()).json()["verified"] is False
    url = version_url(lease)
    assert app.get(f"{url}/trajectory").json()["verified"] is False


def test_a_run_over_the_servers_limit_stays_unverified(monkeypatch, device, lease, run, problem):
    monkeypatch.setattr("server.results.trajectories.REPLAY_UPDATES", STEPS * run.size - 1)
    send(device, lease, run.ledger).raise_for_status()
    problem(complete(device, lease, run.adapter(), run.ledger, run.result()), 409, "not-replayable")
    device.upload(lease, run.adapter()).raise_for_status()
    assert complete(device, lease, run.adapter(), run.ledger, run.result()).json()["verified"] is False


def test_a_run_that_goes_on_from_an_adapter(fleet, app, device, lease, run, tmp_path, problem):
    finish(device, lease, run)
    fleet.ready_job(app, training=TRAINING, recipe={"rank": 2}, start={"adapter": "alice-movies"})
    second = device.lease()
    for wrong in (None, run.adapter(1)):
        problem(send(device, second, Run(second, tmp_path, start=wrong).ledger), 422, "invalid-trajectory")
    onward = Run(second, tmp_path, start=run.adapter())
    assert finish(device, second, onward)["verified"] is True
    url = version_url(second, 2)
    view = app.get(f"{url}/trajectory").json()
    assert (view["start_sha256"], view["replaces_weights"]) == (sha256_hex(run.adapter()), False)
    assert app.get(f"{url}/lora_B.safetensors").content == onward.adapter()


@pytest.fixture
def ledger_version(fleet, app, device, tmp_path):
    """A version that is kept as its ledger, its lease and its run."""
    fleet.ready_job(app, training=TRAINING, recipe={"rank": 64})
    lease = device.lease()
    run = Run(lease, tmp_path)
    finish(device, lease, run)
    return lease, run


def test_a_ledger_smaller_than_b_is_kept_in_its_place(home, app, ledger_version):
    lease, run = ledger_version
    url = version_url(lease)
    assert app.get(f"{url}/trajectory").json()["replaces_weights"] is True
    assert len(run.ledger) < len(run.adapter())
    assert sha256_hex(run.adapter()) in home.stored_files()
    home.collect()
    assert sha256_hex(run.adapter()) not in home.stored_files()
    assert sha256_hex(run.ledger) in home.stored_files()
    assert app.get(f"{url}/lora_B.safetensors").content == run.adapter()
    home.collect()
    assert app.get(f"{url}/peft").status_code == 200
    assert sha256_hex(run.adapter()) in home.stored_files()


def test_many_who_ask_at_once_get_the_same_which_is_young_again(home, fleet, app, ledger_version):
    lease, run = ledger_version
    home.collect()
    actors = [fleet.actor(app.token) for _ in range(4)]
    answers = at_once(*(lambda n=n: actors[n].get(f"{version_url(lease)}/lora_B.safetensors") for n in range(4)))
    assert [answer.content for answer in answers] == [run.adapter()] * 4
    # No collector removes it between an answer's first byte and its last.
    os.utime(home.artifacts._path(sha256_hex(run.adapter())), (0, 0))
    app.get(f"{version_url(lease)}/lora_B.safetensors").raise_for_status()
    Collector(home.database, home.artifacts).collect(timedelta(hours=1))
    assert sha256_hex(run.adapter()) in home.stored_files()


def test_a_file_that_would_be_another_is_not_given(home, app, ledger_version, problem):
    """As if a later release replayed otherwise: the hash of the first time holds."""
    lease, run = ledger_version
    home.collect()
    home.change(StoredTrajectory, head=b"x")
    problem(app.get(f"{version_url(lease)}/lora_B.safetensors"), 503, "damaged-file")
    assert set(home.stored_files()).isdisjoint({sha256_hex(run.adapter())})


def test_one_tenant_has_half_of_the_replays(monkeypatch):
    places = (reconstruction.REPLAYS + reconstruction.WAITING) // 2
    monkeypatch.setattr(reconstruction, "_slots", threading.BoundedSemaphore(places + 1))  # so that none waits
    with ExitStack() as held:
        for _ in range(places):
            held.enter_context(reconstruction.replay_slot("first"))
        with pytest.raises(Unavailable), reconstruction.replay_slot("first"):
            pass
        with reconstruction.replay_slot("second"):
            pass
    with reconstruction.replay_slot("first"):
        pass
