"""Which versions are approved by themselves, which wait for a person, and what becomes of `main`."""

import pytest

from shared.registry import ApprovalRule
from shared.result import Result
from tests.server.actors import result
from tests.server.registry.conftest import URL


def objection(parent=None, rule=None, **scores):
    scores_of_run = Result.model_validate(result(**scores))
    return ApprovalRule.model_validate(rule or {}).objection(scores_of_run, parent)


@pytest.mark.parametrize(
    ("rule", "before", "after", "parent", "approved"),
    [
        ({}, 0.5, 0.5, None, True),
        ({}, 0.5, 0.49, None, False),
        ({"margin": 0.05}, 0.8, 0.75, None, True),  # 0.8 - 0.75 is more than 0.05 in floating point
        ({"margin": 0.05}, 0.8, 0.74, None, False),
        ({}, 0.5, 0.7, 0.7, True),
        ({}, 0.5, 0.7, 0.75, False),
        ({}, None, 0.7, 0.7, True),
        ({}, None, 0.7, None, False),
        ({}, 0.5, None, None, False),
        ({"unmeasured": "approve"}, None, None, None, True),
        ({"unmeasured": "approve"}, 0.9, 0.1, None, False),
        ({"automatic": False, "unmeasured": "approve", "margin": 1}, 0.1, 0.9, None, False),
    ],
)
def test_the_rule(rule, before, after, parent, approved):
    assert (objection(parent, rule, zero_shot_accuracy=before, tuned_accuracy=after) is None) == approved


@pytest.mark.parametrize("rule", [{}, {"margin": 1, "unmeasured": "approve"}])
def test_a_version_that_is_its_start_is_held(rule):
    assert "no better than its start" in objection(None, rule, best_step=0, zero_shot_accuracy=1.0, tuned_accuracy=1.0)
    texts = {"token_loss_before": 3.1, "token_loss_after": 3.0}
    assert "no better than its start" in objection(None, rule, best_step=0, **texts)


@pytest.mark.parametrize(
    ("rule", "figures", "message"),
    [
        ({}, {"majority_accuracy": 0.75, "baseline_accuracy": 0.75}, None),
        (
            {},
            {"majority_accuracy": 0.8},
            "the score 75.0% is below the 80.0% of always choosing the most frequent answer",
        ),
        ({}, {"majority_accuracy": 0.5, "baseline_accuracy": 0.8}, "the 80.0% of a logistic regression on n-grams"),
        ({"margin": 0.05}, {"majority_accuracy": 0.5, "baseline_accuracy": 0.8}, None),
        (
            {},
            {"earlier_accuracy_before": 0.8, "earlier_accuracy_after": 0.77},
            "on the records of earlier jobs fell from 80.0% to 77.0%",
        ),
        ({}, {"earlier_accuracy_before": 0.8, "earlier_accuracy_after": 0.78}, None),
        ({"margin": 0.03}, {"earlier_accuracy_before": 0.8, "earlier_accuracy_after": 0.77}, None),
    ],
)
def test_a_version_below_a_baseline_of_its_device_or_worse_on_earlier_records_is_held(rule, figures, message):
    reason = objection(None, rule, zero_shot_accuracy=0.5, tuned_accuracy=0.75, **figures)
    assert reason is None if message is None else message in reason


@pytest.mark.parametrize(
    ("rule", "change", "held"),
    [
        ({}, 0.05, False),
        ({}, 0.051, True),
        ({}, -0.5, False),
        ({"max_reference_increase": 0.2}, 0.051, False),
        ({"max_reference_increase": 0.01, "margin": 1, "unmeasured": "approve"}, 0.02, True),
        ({"max_reference_increase": None}, 9.0, False),
    ],
)
def test_a_version_that_has_lost_general_language_is_held_whatever_its_scores_are(rule, change, held):
    texts = {"token_loss_before": 3.1, "token_loss_after": 3.0}
    preference = texts | {"preference_margin": 0.7}
    for figures in ({"zero_shot_accuracy": 0.5, "tuned_accuracy": 0.75}, texts, preference):
        reason = objection(None, rule, reference_loss_change=change, **figures)
        assert (reason is not None) == held
        assert reason is None or f"the loss of the reference texts rose by {change:.1%}, more than" in reason


def test_the_change_of_the_reference_loss_is_a_number_above_minus_one(device, lease, problem):
    for change in ("NaN", "Infinity", -1.5, "much"):
        completion = {"adapter_sha256": "0" * 64, "result": result(reference_loss_change=change)}
        problem(device.post(f"/v1/leases/{lease['id']}/complete", json=completion), 422, "invalid-request")


@pytest.mark.parametrize(("before", "after", "approved"), [(3.1, 3.0, True), (3.1, 3.1, False), (3.0, 3.1, False)])
def test_the_rule_for_texts(before, after, approved):
    unmeasured = {"zero_shot_accuracy": None, "tuned_accuracy": None}
    reason = objection(None, {"margin": 1}, token_loss_before=before, token_loss_after=after, **unmeasured)
    assert reason is None if approved else "per token did not fall" in reason


@pytest.mark.parametrize(
    ("rule", "before", "after", "message"),
    [
        ({"metric": "token_f1"}, 0.5, 0.5, None),
        ({"metric": "token_f1", "margin": 0.05}, 0.5, 0.44, "token_f1 fell from 50.0% to 44.0%"),
        ({"metric": "rouge_l"}, 0.5, 0.44, None),
        ({"metric": "token_f1"}, None, None, "the device measured no token_f1"),
        ({"metric": "token_f1", "unmeasured": "approve"}, None, None, None),
    ],
)
def test_the_rule_for_scores_of_texts(rule, before, after, message):
    others = {"examples": 4, "exact_match": 0, "rouge_l": 0.3, "words": 9, "own_words": 9}
    text_scores = {"written_before": before, "written_after": after}
    scores = {name: None if value is None else others | {"token_f1": value} for name, value in text_scores.items()}
    # The loss rose, which only the default rule minds.
    scores |= {"token_loss_before": 3.0, "token_loss_after": 3.5, "zero_shot_accuracy": None, "tuned_accuracy": None}
    reason = objection(None, rule, **scores)
    assert reason is None if message is None else message in reason
    assert "loss per token" in objection(None, {}, **scores)


@pytest.mark.parametrize(
    ("rule", "accuracy", "after", "message"),
    [
        ({}, 0.9, 3.05, None),
        ({}, 0.9, 3.07, "rose from 3.000 to 3.070, by more than 2%"),
        ({"max_increase": 0.05}, 0.9, 3.07, None),
        ({}, 0.5, 2.9, "in 50.0% of the held-out records only"),
    ],
)
def test_the_rule_for_preferences(rule, accuracy, after, message):
    figures = {"token_loss_before": 3.0, "token_loss_after": after, "preference_margin": 0.7}
    reason = objection(None, rule, tuned_accuracy=accuracy, zero_shot_accuracy=None, **figures)
    assert reason is None if message is None else message in reason


def test_a_version_that_fell_waits_for_a_person(app, publish, decide, problem):
    held_version = publish(zero_shot_accuracy=0.75, tuned_accuracy=0.5)
    assert (held_version["state"], held_version["message"]) == ("held", "the score fell from 75.0% to 50.0%")
    adapter = decide("GET", "")
    assert (adapter["main"], adapter["latest"]["version"], adapter["versions"]) == (None, 1, 1)
    problem(app.get(f"{URL}/revisions/main"), 404, "revision-not-found")
    assert decide("GET", "/revisions/v1")["version"] == 1  # somebody must try it
    problem(app.post(f"{URL}/promote", json={"revision": "v1"}), 409, "conflict")
    approved_version = decide("POST", "/versions/1/approve", {"reason": "tried it"})
    assert (approved_version["state"], approved_version["message"]) == ("approved", "")
    assert decide("GET", "/revisions/main")["version"] == 1
    assert decide("POST", "/versions/1/approve") == approved_version
    assert [event["action"] for event in decide("GET", "/events")["items"]] == ["approved", "held"]


def test_what_was_held_is_no_main_over_a_later_one(publish, decide):
    publish(tuned_accuracy=0.1)
    publish()
    assert decide("GET", "")["main"] == 2
    decide("POST", "/versions/1/approve")
    assert decide("GET", "")["main"] == 2


def test_a_held_version_is_deleted_and_comes_back_held(publish, decide):
    publish(tuned_accuracy=0.1)
    publish()
    assert decide("DELETE", "/versions/1")["state"] == "deleted"
    assert decide("POST", "/versions/1/undelete")["state"] == "held"


def test_rules_of_tenant_and_adapter(fleet, app, publish, decide):
    def states():
        return [item["state"] for item in decide("GET", "/versions")["items"]][::-1]

    tenant = app.get("/v1/approval-rule")
    assert tenant.json() == {"rule": {"automatic": True, "margin": 0, "unmeasured": "hold"}, "source": "server"}
    loose = {"automatic": True, "margin": 0.3, "unmeasured": "hold"}
    response = app.put("/v1/approval-rule", json={"rule": loose})
    assert response.json() == {"rule": loose, "source": "tenant"}
    assert fleet.app("other").get("/v1/approval-rule").json()["source"] == "server"
    publish(tuned_accuracy=0.25)
    publish(tuned_accuracy=0.15)
    assert states() == ["approved", "held"]
    assert decide("GET", "/rule") == {"rule": loose, "source": "tenant"}
    strict = loose | {"automatic": False}
    assert decide("PUT", "/rule", {"rule": strict}) == {"rule": strict, "source": "adapter"}
    publish(tuned_accuracy=1.0)
    assert states() == ["approved", "held", "held"]
    publish(job={"adapter": "alice-books"})
    assert app.get("/v1/adapters/alice-books").json()["main"] == 1
    assert decide("PUT", "/rule", {"rule": None})["source"] == "tenant"
    assert app.put("/v1/approval-rule", json={"rule": None}).json()["source"] == "server"
    assert [event["action"] for event in decide("GET", "/events")["items"]][1] == "held"


def test_a_rule_out_of_bounds(app, problem):
    problem(app.put("/v1/approval-rule", json={"rule": {"margin": 2}}), 422, "invalid-request")


def test_a_claimed_score_of_another_device_does_not_become_main(fleet, app):
    """A score is what a device says of itself, so it replaces only what the same device made."""
    first, second = fleet.device(name="a"), fleet.device(name="b")
    fleet.ready_job(app)
    assert first.finish(first.lease())["state"] == "approved"
    fleet.ready_job(app, start={"adapter": "alice-movies"})
    claim = {"zero_shot_accuracy": None, "start_accuracy": 0.75, "tuned_accuracy": 1.0}
    held_version = second.finish(second.lease(), value=9.0, **claim)
    assert (held_version["state"], app.get("/v1/adapters/alice-movies").json()["main"]) == ("held", 1)
    assert "another device trained version 1" in held_version["message"]
    # Neither does one after `main` was deleted, as long as another device's version is left.
    assert app.delete("/v1/adapters/alice-movies/versions/1").status_code in (200, 204)
    fleet.ready_job(app)
    assert first.finish(first.lease())["state"] == "held"
    # Once a person approves the device's version, its next ones are approved by their scores.
    assert app.post("/v1/adapters/alice-movies/versions/2/approve", json={}).status_code == 200
    fleet.ready_job(app)
    third = second.finish(second.lease(), tuned_accuracy=0.9)
    assert (third["version"], third["state"]) == (4, "approved")
