"""Cohorts and their members over HTTP: made, pinned, joined, left; whose they are."""

import numpy as np
import pytest

from shared.recipe import Recipe
from shared.zo.lora import a_fingerprint, flat_size
from tests.server.federation.conftest import URL, cohort_request
from tests.server.homes import SHAPE


def test_recipe_and_a_are_pinned(band):
    cohort = band.create(training={"steps": 5})
    recipe = Recipe.model_validate(cohort["recipe"])
    assert cohort["recipe_id"] == recipe.id
    assert (cohort["a_sha256"], cohort["size_d"]) == (a_fingerprint(recipe, SHAPE), flat_size(recipe, SHAPE))
    assert cohort["settings"]["training"]["eps"] == 0.01
    assert (cohort["members"], cohort["rounds"], cohort["round"], cohort["version"]) == (0, 0, None, None)
    assert band.app.get(URL).json() == cohort
    assert band.app.get("/v1/cohorts").json()["items"] == [cohort]


@pytest.mark.parametrize(
    ("backend", "upload", "estimator"),
    [("xnnpack", "weights", "gradient"), ("xnnpack", "trajectory", "directional"), ("qnn", "trajectory", "replay")],
)
def test_the_estimator_is_settled_with_the_cohort(band, backend, upload, estimator):
    cohort = band.create(recipe={"estimator": "auto", "queries": None, "backend": backend}, upload=upload)
    assert (cohort["recipe"]["estimator"], cohort["settings"]["recipe"]["estimator"]) == (estimator, "auto")


def test_a_name_is_one_thing(band, app, problem):
    app.submit(adapter="readers", user="alice")
    assert "alice" in problem(app.post("/v1/cohorts", json=cohort_request()), 409, "conflict")["detail"]
    band.create(name="writers")
    problem(app.post("/v1/cohorts", json=cohort_request(name="writers")), 409, "conflict")
    answer = app.post("/v1/jobs", json={**app.submit()["request"], "adapter": "writers"})
    assert "belongs to a cohort" in problem(answer, 409, "conflict")["detail"]


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"base": "nothing"}, 404, "unknown-base"),
        ({"task": "nothing"}, 422, "invalid-task"),
        ({"recipe": {"targets": ["gate_proj"], "layers": "last:9"}}, 422, "invalid-recipe"),
        ({"algorithm": {"name": "fedprox"}}, 422, "invalid-request"),
    ],
)
def test_what_cannot_be_a_cohort(app, problem, changes, status, code):
    problem(app.post("/v1/cohorts", json=cohort_request(**changes)), status, code)
    assert app.get("/v1/cohorts").json()["items"] == []


def test_one_device_is_of_one_user(band, fleet, problem):
    band.create("alice")
    device = band.devices["alice"].device_id
    assert band.fleet.operator().put(f"/v1/devices/{device}/users/bob").status_code == 200
    problem(band.app.put(f"{URL}/members/bob", json={"device": device}), 409, "conflict")
    again = band.app.put(f"{URL}/members/alice", json={"device": device})
    assert again.json() == band.app.get(f"{URL}/members").json()["items"][0]
    other = fleet.device(name="other").device_id
    assert band.app.put(f"{URL}/members/alice", json={"device": other}).json()["device_id"] == other
    assert band.app.put(f"{URL}/members/bob", json={"device": device}).status_code == 200
    problem(band.app.put(f"{URL}/members/Bob!", json={"device": other}), 422, "invalid-request")
    problem(band.app.delete(f"{URL}/members/carol"), 404, "not-found")


def test_a_device_of_another_tenant_or_a_revoked_one_cannot_join(band, fleet, home, problem):
    band.create()
    foreign, revoked_device = fleet.device("other"), fleet.device(name="lost")
    home.revoke_device(revoked_device.device_id)
    for device in (foreign, revoked_device):
        problem(band.app.put(f"{URL}/members/alice", json={"device": device.device_id}), 404, "not-found")


def test_a_member_whose_device_was_revoked_is_not_waited_for(band, home):
    band.create("alice", "bob", quorum=1)
    home.revoke_device(band.devices["bob"].device_id)
    band.open()
    assert band.parts()["bob"]["state"] == "failed"
    band.train("alice", 1.0)
    assert band.round()["state"] == "aggregating"


def test_only_operators_let_users_in(band, operator, problem):
    band.create(membership="operator")
    device = band.fleet.device().device_id
    problem(band.app.put(f"{URL}/members/alice", json={"device": device}), 403, "forbidden")
    assert operator.put(f"{URL}/members/alice", json={"device": device}).status_code == 200
    assert band.app.delete(f"{URL}/members/alice").status_code == 204


def test_who_left_may_come_back(band):
    band.create("alice", "bob")
    band.app.delete(f"{URL}/members/alice")
    assert [member["user"] for member in band.app.get(f"{URL}/members").json()["items"]] == ["bob"]
    band.join("alice")
    band.open()
    band.train("alice", 1.0)
    band.train("bob", 1.0)
    members = {member["user"]: member["updates"] for member in band.app.get(f"{URL}/members").json()["items"]}
    assert members == {"alice": 1, "bob": 1}


def test_another_device_in_the_middle_of_a_round_takes_no_part_in_it(band, problem):
    band.begin("alice", "bob", "carol")
    old = band.lease("alice")
    band.join("alice")
    problem(band.devices["alice"].get(f"/v1/leases/{old['id']}/start"), 404, "not-found")
    assert band.lease("alice") is None
    band.train_all(bob=1.0, carol=3.0)
    np.testing.assert_array_equal(band.b(), np.float32(2.0))


def test_the_trail_tells_who_did_what(band, operator):
    band.begin("alice", "bob")
    band.app.post(f"{URL}/rounds/1/close")
    band.app.delete(f"{URL}/members/bob")
    events = operator.get("/v1/adapters/readers/events").json()["items"]
    assert [event["action"] for event in events] == [
        *("left", "round-abandoned", "round-closed", "round-opened", "joined", "joined", "cohort-created")
    ]
    token_id = band.app.get("/v1/whoami").json()["token_id"]
    assert [event["actor"] for event in events] == [
        token_id,
        "server",
        token_id,
        token_id,
        token_id,
        token_id,
        token_id,
    ]
    assert events[0]["reason"] == "user bob"


def test_without_its_adapter_a_cohort_opens_no_round(band, problem):
    band.create("alice", "bob")
    assert band.app.delete("/v1/adapters/readers").status_code == 200
    problem(band.app.post(f"{URL}/rounds"), 404, "adapter-not-found")
    assert band.app.post("/v1/adapters/readers/undelete").status_code == 200
    band.open()


def test_a_round_at_a_time(band, problem):
    band.begin("alice", "bob", most_rounds=1)
    assert problem(band.app.post(f"{URL}/rounds"), 409, "conflict")["round"] == 1
    band.app.post(f"{URL}/rounds/1/close")
    assert "maximum" in problem(band.app.post(f"{URL}/rounds"), 409, "conflict")["detail"]
    problem(band.app.get(f"{URL}/rounds/2"), 404, "round-not-found")


def test_a_member_joins_and_trains_with_a_device_that_is_bound_to_it(band, fleet, operator, problem):
    band.create(quorum=1)
    stranger = fleet.device(name="stranger", users=["mallory"])
    problem(band.app.put(f"{URL}/members/alice", json={"device": stranger.device_id}), 409, "device-not-bound")
    band.join("alice", "bob", "carol")
    unbind = "/v1/devices/{}/users/{}"
    assert operator.delete(unbind.format(band.devices["bob"].device_id, "bob")).status_code == 204
    band.open()
    assert band.parts()["bob"]["state"] == "failed"
    lease = band.lease("carol")
    assert operator.delete(unbind.format(band.devices["carol"].device_id, "carol")).status_code == 204
    problem(band.upload("carol", lease, 1.0), 410, "lease-ended")
    band.train_all(alice=1.0)
    assert {user: part["state"] for user, part in band.parts().items()} == {
        "alice": "counted",
        "bob": "failed",
        "carol": "failed",
    }
    assert band.app.get("/v1/adapters/readers").json()["main"] == 1
    path = "/v1/devices/self/adapters/readers/main"
    assert band.devices["alice"].get(path).status_code == 200
    assert band.app.delete(f"{URL}/members/alice").status_code == 204
    for device in (stranger, *band.devices.values()):
        problem(device.get(path), 404, "adapter-not-found")
