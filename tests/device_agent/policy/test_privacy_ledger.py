"""The device's ledger of privacy spending."""

import sys

import pytest

from device_agent.errors import PolicyForbids, PrivacyLimitReached
from device_agent.policy.evaluator import OwnerConsent
from device_agent.policy.privacy_ledger import PrivacyCost, PrivacyLedger, epsilon_in_child
from device_agent.training.run_directory import RunDirectory
from shared.federation.accounting import Spending, epsilon_of

SPENDING = Spending(sampling_rate=0.1, noise_multiplier=2.0, times=3)


@pytest.fixture
def make(tmp_path):
    return lambda epsilon=None: PrivacyLedger(tmp_path / "privacy.json", OwnerConsent(privacy_limit=epsilon))


def terms_of(tmp_path, job_id="job-1", dataset="movies", spending=SPENDING):
    return PrivacyCost(job_id=job_id, dataset=dataset, directory=tmp_path / dataset, spending=spending)


def run_of(tmp_path, name="run"):
    run = RunDirectory(tmp_path / name)
    run.path.mkdir()
    return run


def test_a_note_that_no_charge_belongs_to_pays_for_nothing(make, tmp_path):
    cost, run = terms_of(tmp_path), run_of(tmp_path)
    make().charge(cost, run)
    (tmp_path / "privacy.json").unlink()
    make().charge(cost, run)
    assert len(make().charges()) == 1


def test_a_run_that_was_paid_goes_on_under_a_lower_limit(make, tmp_path):
    cost, run = terms_of(tmp_path), run_of(tmp_path)
    make().charge(cost, run)
    make(0).check(cost, run)
    for other in (terms_of(tmp_path, "job-2"), terms_of(tmp_path, spending=None)):
        with pytest.raises(PrivacyLimitReached):
            make(0).check(other, run_of(tmp_path, other.job_id) if other.spending else run)


def test_the_child_counts_as_the_server_does():
    assert epsilon_in_child([SPENDING, SPENDING], 1e-5) == epsilon_of([SPENDING, SPENDING], 1e-5)
    assert epsilon_in_child([], 1e-5) == 0


def test_a_computation_that_fails_is_no_permission(make, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert epsilon_in_child([SPENDING], 1e-5) is None
    with pytest.raises(PrivacyLimitReached, match="cannot be computed"):
        make(1000).check(terms_of(tmp_path), run_of(tmp_path))


def test_a_damaged_ledger_stops_training(make, tmp_path):
    (tmp_path / "privacy.json").write_text('{"charges": [')
    with pytest.raises(PolicyForbids, match="restore it from a backup"):
        make().check(terms_of(tmp_path), run_of(tmp_path))
