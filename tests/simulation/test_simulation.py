"""Complete simulations on a real program: reproducible with any executor and after interruptions."""

import numpy as np
import pytest

from shared.errors import Conflict
from simulation.records import Store
from tests.simulation.conftest import SMALL


class Interrupted(Exception):
    """Simulates a kill within one process."""


def interrupt_in(round_):
    def on_progress(activity, done, total):
        if activity.endswith(f" {round_}") and done:
            raise Interrupted

    return on_progress


def final(outcome, directory):
    return Store(directory).adapter(outcome.rounds[-1].number, outcome.manifest.size)


def test_equal_seeds_give_equal_reports_in_any_process(run):
    inline, in_processes = run(), run(engine="processes", workers=2)
    assert inline.digest == in_processes.digest
    assert [record.seconds for record in inline.rounds] != [record.seconds for record in in_processes.rounds]
    assert run({"seed": 1}).digest != inline.digest


def test_a_simulated_cohort_learns(run):
    outcome = run({"devices": 12, "rounds": 3, "data": {"test": 64}, "cohort": {"training": {"steps": 8}}})
    losses = [record.loss for record in outcome.rounds]
    assert losses[-1] < losses[0]
    assert outcome.rounds[1].tuned_accuracy > outcome.rounds[1].start_accuracy


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        ({"name": "fedavg"}, "adam"),
        pytest.param({"name": "fedbuff", "buffer_size": 3}, "sgd", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_simulation_resumes_with_the_same_result(run, tmp_path, algorithm, optimizer):
    changes = {"rounds": 3, "cohort": {"algorithm": algorithm, "optimizer": {"name": optimizer, "lr": 0.5}}}
    uninterrupted = run(changes)
    directory = tmp_path / "interrupted"
    with pytest.raises(Interrupted):
        run(changes, directory, on_progress=interrupt_in(2))
    assert len(Store(directory).rounds()) == 2
    assert run(changes, directory).digest == uninterrupted.digest


def test_a_directory_of_another_simulation_is_rejected(run, tmp_path):
    run(directory=tmp_path / "one")
    with pytest.raises(Conflict, match="other settings"):
        run({"seed": 1}, tmp_path / "one")


def test_trajectory_and_weights_uploads_give_equal_versions(run, tmp_path):
    mu = {"algorithm": {"name": "fedprox", "mu": 2}}
    b, scalars = (
        final(run({"cohort": mu | {"upload": upload}}, tmp_path / upload), tmp_path / upload)
        for upload in ("weights", "trajectory")
    )
    assert b.any()
    np.testing.assert_array_equal(b, scalars)


@pytest.mark.slow
def test_asynchronous_updates_are_stale_and_count(run):
    outcome = run({"rounds": 4, "cohort": {"algorithm": {"name": "fedbuff", "buffer_size": 2}}})
    assert [record.counted for record in outcome.rounds[1:]] == [2] * 4
    assert max(record.mean_staleness for record in outcome.rounds) > 0
    assert outcome.rounds[-1].clock > outcome.rounds[1].clock > 0
    assert len(outcome.rounds[-1].in_progress) == SMALL["devices"] - 1  # one has just finished


def test_below_quorum_there_is_no_version_and_the_next_round_is_tried(run):
    outcome = run({"faults": {"dropout": 0.4}, "cohort": {"quorum": 4}, "rounds": 4})
    published = {record.published for record in outcome.rounds[1:]}
    assert published == {True, False}
    for before, record in zip(outcome.rounds, outcome.rounds[1:], strict=False):
        assert record.selected == 6
        assert record.counted == (6 - record.dropped) * record.published
        assert record.published == (6 - record.dropped >= 4)
        assert record.published == (record.b_sha256 != before.b_sha256)
        assert bool(record.why) != record.published


@pytest.mark.parametrize(
    ("faults", "cohort", "refused"),
    [
        ({"attack": "not_finite"}, {}, "not finite"),
        ({"attack": "huge", "strength": 1e4}, {"norm_limit": 50}, "norm"),
    ],
)
def test_rejected_updates_are_not_counted(run, faults, cohort, refused):
    outcome = run({"faults": {"poisoned": 0.34} | faults, "cohort": cohort})
    for record in outcome.rounds[1:]:
        assert (record.counted, record.poisoned, sum(record.refused.values())) == (4, 0, 2)
        assert all(refused in why for why in record.refused)


def test_masked_sums_are_the_clipped_mean(run, tmp_path):
    masking = {"minimum": 3, "most_members": 6, "bits": 64}
    cohort = {"quorum": 3, "aggregator": {"clip_norm": 1.0}}
    plain = run({"rounds": 1, "cohort": cohort}, tmp_path / "plain")
    hidden = run({"rounds": 1, "cohort": cohort | {"upload": "masked", "masking": masking}}, tmp_path / "hidden")
    np.testing.assert_allclose(final(hidden, tmp_path / "hidden"), final(plain, tmp_path / "plain"), atol=1e-6)
    assert hidden.rounds[1].clipped == plain.rounds[1].clipped == 6
    assert hidden.rounds[1].bytes.masked > 8 * hidden.manifest.size


def test_only_so_many_devices_are_measured_after_a_round(run):
    outcome = run({"measured": 4, "rounds": 1})
    assert [sorted(record.devices) for record in outcome.rounds] == [[0, 1, 2, 3]] * 2


@pytest.mark.slow
def test_member_privacy_adds_noise_and_spends_a_budget(run):
    members = {"clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-5}
    outcome = run({"rounds": 3, "cohort": {"privacy": {"members": members}}})
    spent = [record.epsilon["members"] for record in outcome.rounds]
    assert 0 == spent[0] < spent[1] < spent[2] < spent[3]
    norm_without_noise = run({"rounds": 1, "cohort": {"aggregator": {"clip_norm": 1.0}}}).rounds[1].update_norm
    # Noise of sigma clip / n in each of D coordinates.
    assert outcome.rounds[1].update_norm == pytest.approx(
        (norm_without_noise**2 + outcome.manifest.size / 9) ** 0.5, rel=0.1
    )
    limited = run({"rounds": 3, "cohort": {"privacy": {"members": members | {"epsilon": spent[2]}}}})
    assert [record.published for record in limited.rounds] == [False, True, True, False]
    assert "budget" in limited.rounds[3].why
    assert limited.rounds[3].epsilon == limited.rounds[2].epsilon


@pytest.mark.slow
def test_a_cohort_with_private_examples_reports_no_accuracy_and_is_reproducible(run, tmp_path):
    examples = {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, "sampling_rate": 0.5}
    changes = {"cohort": {"recipe": {"privacy": "clipped"}, "privacy": {"examples": examples}}}
    program = tmp_path / "clipping"
    outcome = run(changes, program=program)
    assert outcome.manifest.recipe.privacy == "clipped"
    for record in outcome.rounds[1:]:
        assert record.published
        assert record.update_norm > 0
        assert (record.start_accuracy, record.tuned_accuracy) == (None, None)
    spent = [record.epsilon["examples"] for record in outcome.rounds]
    assert 0 == spent[0] < spent[1] < spent[2]
    assert run(changes, program=program).digest == outcome.digest
