"""Whole simulations on a real program: equal from one seed, whatever runs them and whatever interrupts them."""

import importlib.util

import numpy as np
import pytest

from shared.errors import BadRequest, Conflict
from simulation.records import Store
from tests.simulation.conftest import SMALL


class Interrupted(Exception):
    """What a kill is for a test in one process: nothing after it is done."""


def interrupt_in(round_):
    def tell(what, done, of):
        if what.endswith(f" {round_}") and done:
            raise Interrupted

    return tell


def final(found, directory):
    return Store(directory).adapter(found.rounds[-1].number, found.manifest.size)


def test_one_seed_makes_one_report_in_this_process_and_in_others(run):
    alone, spread = run(), run(engine="processes", workers=2)
    assert alone.digest == spread.digest
    assert [told.seconds for told in alone.rounds] != [told.seconds for told in spread.rounds]
    assert run({"seed": 1}).digest != alone.digest


def test_it_learns(run):
    found = run({"devices": 12, "rounds": 3, "data": {"test": 64}, "cohort": {"training": {"steps": 8}}})
    losses = [told.loss for told in found.rounds]
    assert losses[-1] < losses[0]
    assert found.rounds[1].tuned_accuracy > found.rounds[1].start_accuracy


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        ({"name": "fedavg"}, "adam"),
        pytest.param({"name": "fedbuff", "buffer_size": 3}, "sgd", marks=pytest.mark.slow),
    ],
)
def test_what_is_interrupted_goes_on_and_comes_out_the_same(run, tmp_path, algorithm, optimizer):
    changes = {"rounds": 3, "cohort": {"algorithm": algorithm, "optimizer": {"name": optimizer, "lr": 0.5}}}
    whole = run(changes)
    place = tmp_path / "interrupted"
    with pytest.raises(Interrupted):
        run(changes, place, tell=interrupt_in(2))
    assert len(Store(place).rounds()) == 2
    assert run(changes, place).digest == whole.digest


def test_another_simulation_does_not_go_on_in_a_directory(run, tmp_path):
    run(directory=tmp_path / "one")
    with pytest.raises(Conflict, match="other settings"):
        run({"seed": 1}, tmp_path / "one")


def test_trajectories_make_the_version_that_weights_make(run, tmp_path):
    mu = {"algorithm": {"name": "fedprox", "mu": 2}}
    b, scalars = (
        final(run({"cohort": mu | {"upload": upload}}, tmp_path / upload), tmp_path / upload)
        for upload in ("weights", "trajectory")
    )
    assert b.any()
    np.testing.assert_array_equal(b, scalars)


@pytest.mark.slow
def test_asynchronous_updates_are_stale_and_count(run):
    found = run({"rounds": 4, "cohort": {"algorithm": {"name": "fedbuff", "buffer_size": 2}}})
    assert [told.counted for told in found.rounds[1:]] == [2] * 4
    assert max(told.stale for told in found.rounds) > 0
    assert found.rounds[-1].clock > found.rounds[1].clock > 0
    assert len(found.rounds[-1].flights) == SMALL["devices"] - 1  # the last one has just landed


def test_below_quorum_there_is_no_version_and_the_next_round_is_tried(run):
    found = run({"faults": {"dropout": 0.4}, "cohort": {"quorum": 4}, "rounds": 4})
    made = {told.published for told in found.rounds[1:]}
    assert made == {True, False}
    for before, told in zip(found.rounds, found.rounds[1:], strict=False):
        assert told.asked == 6
        assert told.counted == (6 - told.dropped) * told.published
        assert told.published == (6 - told.dropped >= 4)
        assert told.published == (told.b_sha256 != before.b_sha256)
        assert bool(told.why) != told.published


@pytest.mark.parametrize(
    ("faults", "cohort", "refused"),
    [
        ({"attack": "not_finite"}, {}, "not finite"),
        ({"attack": "huge", "strength": 1e4}, {"norm_limit": 50}, "norm"),
    ],
)
def test_what_the_server_refuses_does_not_count(run, faults, cohort, refused):
    found = run({"faults": {"poisoned": 0.34} | faults, "cohort": cohort})
    for told in found.rounds[1:]:
        assert (told.counted, told.poisoned, sum(told.refused.values())) == (4, 0, 2)
        assert all(refused in why for why in told.refused)


@pytest.mark.slow
def test_a_median_withstands_what_a_mean_does_not(run):
    faults = {"poisoned": 0.34, "attack": "sign_flip", "strength": 50}
    norms = {
        name: run({"faults": faults, "cohort": {"aggregator": {"name": name}}}).rounds[1].update_norm
        for name in ("mean", "median")
    }
    honest = run().rounds[1].update_norm
    assert norms["mean"] > 5 * honest
    assert norms["median"] < 2 * honest


def test_an_attack_is_the_same_on_trajectories(run):
    faults = {"poisoned": 0.34, "attack": "sign_flip", "strength": 2}
    weights, scalars = (
        run({"rounds": 1, "faults": faults, "cohort": {"upload": upload}}).rounds[1]
        for upload in ("weights", "trajectory")
    )
    assert weights.poisoned == scalars.poisoned == 2
    assert scalars.update_norm == pytest.approx(weights.update_norm, rel=1e-4)


def test_masked_sums_are_the_clipped_mean(run, tmp_path):
    masking = {"minimum": 3, "most_members": 6, "bits": 64}
    cohort = {"quorum": 3, "aggregator": {"clip_norm": 1.0}}
    plain = run({"rounds": 1, "cohort": cohort}, tmp_path / "plain")
    hidden = run({"rounds": 1, "cohort": cohort | {"upload": "masked", "masking": masking}}, tmp_path / "hidden")
    np.testing.assert_allclose(final(hidden, tmp_path / "hidden"), final(plain, tmp_path / "plain"), atol=1e-6)
    assert hidden.rounds[1].clipped == plain.rounds[1].clipped == 6
    assert hidden.rounds[1].bytes.masked > 8 * hidden.manifest.size


def test_masked_rounds_lose_devices_in_any_phase(run):
    masking = {"minimum": 3, "most_members": 12, "threshold": "majority"}
    cohort = {"quorum": 3, "aggregator": {"clip_norm": 1.0}, "upload": "masked", "masking": masking}
    changes = {"devices": 12, "faults": {"dropout": 0.25}, "cohort": cohort}
    found = run(changes)
    assert sum(told.dropped for told in found.rounds) > 0
    for told in found.rounds[1:]:
        assert told.published
        assert 12 - told.dropped <= told.counted <= 12
    assert run(changes).digest == found.digest


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'mobizo[ray]'")
@pytest.mark.slow
def test_ray_makes_the_same_report(run):
    assert run(engine="ray", workers=2).digest == run().digest


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_it_is_said_how_to_get_it(run):
    with pytest.raises(BadRequest, match=r"mobizo\[ray\]"):
        run(engine="ray")


def test_only_so_many_devices_are_measured_after_a_round(run):
    found = run({"measured": 4, "rounds": 1})
    assert [sorted(told.devices) for told in found.rounds] == [[0, 1, 2, 3]] * 2


@pytest.mark.slow
def test_members_privacy_has_noise_a_price_and_a_budget(run):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'mobizo[privacy]'")
    members = {"clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-5}
    found = run({"rounds": 3, "cohort": {"privacy": {"members": members}}})
    spent = [told.epsilon["members"] for told in found.rounds]
    assert 0 == spent[0] < spent[1] < spent[2] < spent[3]
    quiet = run({"rounds": 1, "cohort": {"aggregator": {"clip_norm": 1.0}}}).rounds[1].update_norm
    # Noise of sigma clip / n in each of D coordinates.
    assert found.rounds[1].update_norm == pytest.approx((quiet**2 + found.manifest.size / 9) ** 0.5, rel=0.1)
    held = run({"rounds": 3, "cohort": {"privacy": {"members": members | {"epsilon": spent[2]}}}})
    assert [told.published for told in held.rounds] == [False, True, True, False]
    assert "budget" in held.rounds[3].why
    assert held.rounds[3].epsilon == held.rounds[2].epsilon
