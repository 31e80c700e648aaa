"""Rounds that keep their members, or their members' examples, private: noise, what it costs, and when it is enough."""

import re

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from tests.server.actors import assert_problem
from tests.server.federation.conftest import COHORT, NO_FIGURES, URL, epsilon_of

MEMBERS = {"clip": 4.0, "noise_multiplier": 2.0}
EXAMPLES = {"clip": 0.2, "noise_multiplier": 1.0, "sampling_rate": 0.1}
CLIPPED = COHORT["recipe"] | {"privacy": "clipped"}


def of_rounds(count):
    return pytest.approx(epsilon_of(GaussianDpEvent(2.0), count), rel=2e-3)


def of_runs(count):
    return pytest.approx(epsilon_of(PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)), 3 * count), rel=2e-3)


def privacy_view(band):
    return band.app.get(f"{URL}/privacy").json()


def test_a_private_mean_is_clipped_noised_and_paid_for(band):
    band.create("alice", "bob", privacy={"members": MEMBERS})
    assert (privacy_view(band)["members_epsilon"], privacy_view(band)["rounds"]) == (0.0, 0)
    band.open()
    band.train_all(alice=100.0, bob=-100.0)
    b = band.b()
    # The mean of two clipped opposites is zero; what is left is noise of 2 x 4 / 2 in each element.
    assert 2.0 < b.std() < 6.0
    assert np.abs(b).max() < 40
    version = band.app.get("/v1/adapters/readers/revisions/main").json()
    assert version["cohort"]["epsilon"] == of_rounds(1)
    privacy = privacy_view(band)
    assert (privacy["rounds"], privacy["members_epsilon"], privacy["examples_epsilon"]) == (1, of_rounds(1), None)


def test_no_round_opens_that_would_exceed_the_cohorts_budget(band):
    budget = {"epsilon": 1.1 * epsilon_of(GaussianDpEvent(2.0), 1)}
    band.begin("alice", "bob", privacy={"members": MEMBERS | budget})
    band.train_all(alice=1.0, bob=1.0)
    problem = assert_problem(band.app.post(f"{URL}/rounds"), 409, "privacy-budget-exceeded")
    assert (problem["spent"], problem["epsilon"]) == (of_rounds(1), of_rounds(2))
    assert privacy_view(band)["rounds"] == 1


def test_examples_are_paid_for_by_each_run(band):
    band.begin("alice", "bob", recipe=CLIPPED, privacy={"examples": EXAMPLES})
    band.train_all(alice=1.0, bob=2.0, result_changes=NO_FIGURES)
    np.testing.assert_array_equal(band.b(), np.float32(1.5))
    privacy = privacy_view(band)
    assert (privacy["examples_epsilon"], privacy["members_epsilon"]) == (of_runs(1), None)
    assert band.app.get("/v1/users/alice/privacy").json()["epsilon"] == of_runs(1)


def test_who_has_nothing_left_to_spend_is_not_asked(band, operator):
    band.create("alice", "bob", quorum=1, recipe=CLIPPED, privacy={"examples": EXAMPLES})
    assert operator.put("/v1/users/bob/privacy", json={"epsilon": 0.01}).status_code == 200
    band.open()
    parts = band.parts()
    assert parts["bob"]["state"] == "failed"
    assert band.lease("bob") is None
    assert band.lease("alice")["job"]["request"]["privacy"]["noise_multiplier"] == 1.0
    assert band.app.get("/v1/users/bob/privacy").json()["runs"] == 0


def test_private_members_have_no_exact_figures_anywhere(band):
    """Neither in manifest and card, nor in rounds, updates, jobs and their events."""
    band.begin("alice", "bob", privacy={"members": MEMBERS})
    lease = band.lease("alice")
    progress = {"phase": "training", "step": 1, "steps": 3, "loss": 0.625, "accuracy": 0.375, "best_accuracy": 0.375}
    assert band.devices["alice"].post(f"/v1/leases/{lease['id']}/heartbeat", json=progress).status_code == 200
    figures = {"train_examples": 777, "zero_shot_accuracy": 0.375, "tuned_accuracy": 0.875}
    for user in ("alice", "bob"):
        band.train(user, 1.0, **figures)
    band.work()
    manifest = band.app.get("/v1/adapters/readers/revisions/main").json()
    assert manifest["result"]["train_examples"] is None
    assert (manifest["result"]["zero_shot_accuracy"], manifest["result"]["start_accuracy"]) == (None, None)
    card = band.app.get("/v1/adapters/readers/versions/1/peft/README.md").text
    assert "| training examples | private |" in card
    job = band.parts()["alice"]["job_id"]
    views = [
        manifest,
        band.app.get("/v1/adapters/readers").json(),
        band.app.get(URL).json()["round"],
        band.round(),
        *band.parts().values(),
        band.app.get(f"/v1/jobs/{job}").json()["result"],
        band.app.get(f"/v1/jobs/{job}").json()["progress"],
        band.app.get("/v1/jobs").json(),
        band.app.get(f"/v1/jobs/{job}/events").text,
        band.app.get("/v1/adapters/readers/events").json(),
        card,
    ]
    for view in map(str, views):
        assert not re.search(r"(?<![\w.])(?:0\.375|0\.875|0\.625|37\.5%|87\.5%|777|1554)(?!\w)", view), view
    for part in band.parts().values():
        assert (part["norm"], part["claimed_examples"], part["examples"]) == (None, None, None)
    assert band.round()["measured"] == 0
