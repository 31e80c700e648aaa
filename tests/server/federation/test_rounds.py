"""Rounds over HTTP: opened, trained, averaged, published; what ends one, and what follows."""

from datetime import timedelta

import numpy as np

from server.storage.garbage_collection import Collector
from shared.canonical import sha256_hex
from shared.recipe import Recipe
from shared.zo.lora import a_fingerprint
from tests.server.actors import JOB
from tests.server.federation.conftest import URL
from tests.server.homes import SHAPE


def test_two_rounds_of_federated_averaging(band):
    open_round = band.begin("alice", "bob", "carol")
    assert (open_round["number"], open_round["state"], open_round["members"], open_round["start_version"]) == (
        1,
        "open",
        3,
        None,
    )
    assert band.train("alice", 1.0) == {"cohort": "readers", "round": 1, "updates": 1}
    band.train_all(bob=2.0)
    assert band.round()["state"] == "open"
    band.train("carol", 4.5)
    assert band.round()["state"] == "aggregating"
    band.work()
    round_view = band.round()
    assert (round_view["state"], round_view["version"], round_view["updates"]) == ("published", 1, 3)
    np.testing.assert_array_equal(band.b(), np.float32(2.5))
    card = band.app.get("/v1/adapters/readers/versions/1/peft/README.md").text
    assert "round 1 of cohort readers: 3 devices' updates" in card
    second = band.open()
    assert (second["number"], second["start_version"]) == (2, 1)
    band.train_all(alice=3.5, bob=2.5, carol=1.5)
    assert band.round(2)["version"] == 2
    np.testing.assert_array_equal(band.b(), np.float32(2.5))
    version = band.app.get("/v1/adapters/readers/revisions/v2").json()
    assert (version["job_id"], version["device_id"], version["state"]) == (None, None, "approved")
    assert (version["parent"]["version"], version["cohort"]["round"], version["cohort"]["updates"]) == (1, 2, 3)


def test_only_a_members_device_may_choose_the_cohorts_version_as_a_start(band):
    band.begin("alice", "bob")
    band.train_all(alice=1.0, bob=2.0)
    band.devices["carol"] = band.fleet.device(name="carol-phone", users=["carol"])
    for user, expected in (("alice", ["readers"]), ("carol", None)):
        band.fleet.ready_job(band.app, user=user, adapter=f"{user}-own", start="auto")
        starts = band.lease(user).get("starts")
        assert (starts and [start["manifest"]["adapter"] for start in starts]) == expected


def test_the_collector_leaves_a_rounds_files_until_it_has_ended(band):
    def collect():
        Collector(band.home.database, band.home.artifacts).collect(timedelta(0))
        return {file.sha256 for file in band.home.artifacts.listing()}

    band.begin("alice", "bob", optimizer={"name": "momentum"})
    before = collect()
    band.train("alice", 2.0)
    update = collect() - before
    assert update == {sha256_hex(band.update)}
    band.train("bob", 4.0)
    assert len(collect() - before) == 2
    band.work()
    new_files = collect() - before
    assert len(new_files) == 2  # the version's, and the optimizer's momentum
    assert not new_files & update


def test_a_device_is_told_of_its_round(band):
    band.begin("alice", "bob", training={"steps": 3, "seed": 7}, algorithm={"name": "fedprox", "mu": 0.5})
    alice, bob = band.lease("alice"), band.lease("bob")
    task = alice["round"]
    assert (task["cohort"], task["number"], task["upload"]) == ("readers", 1, "weights")
    assert task["algorithm"] == {"name": "fedprox", "mu": 0.5, "staleness_exponent": 0.5, "buffer_size": 10}
    assert alice["job"]["round"] == {"cohort": "readers", "number": 1}
    request = alice["job"]["request"]
    assert (request["user"], request["device"], request["start"]) == ("alice", band.devices["alice"].device_id, None)
    assert alice["start"] is None
    assert request["training"]["seed"] != bob["job"]["request"]["training"]["seed"]
    band.train_all(alice=1.0, bob=1.0)
    band.open()
    again = band.lease("alice")
    assert again["start"]["manifest"]["cohort"]["round"] == 1
    assert again["job"]["request"]["training"]["seed"] != request["training"]["seed"]
    start = band.devices["alice"].get(f"/v1/leases/{again['id']}/start")
    assert start.content == band.home.artifacts.read(again["start"]["manifest"]["sha256"])


def test_below_quorum_at_the_deadline_a_round_is_abandoned(band, problem):
    band.begin("alice", "bob", "carol", quorum=2)
    band.train("alice", 1.0)
    late = band.lease("bob")
    band.past_deadline()
    problem(band.upload("bob", late, 2.0), 410, "round-closed")
    band.work()
    round_view = band.round()
    assert (round_view["state"], round_view["version"]) == ("abandoned", None)
    assert round_view["why"] == "1 updates had arrived at the deadline; the quorum is 2"
    events = band.app.get("/v1/adapters/readers/events").json()["items"]
    assert (events[0]["action"], events[0]["actor"]) == ("round-abandoned", "server")
    states = {user: part["state"] for user, part in band.parts().items()}
    assert states == {"alice": "counted", "bob": "missed", "carol": "missed"}
    answer = band.devices["bob"].post(f"/v1/leases/{late['id']}/heartbeat", json={"phase": "training"}).json()
    assert answer["stop"]
    assert band.app.get("/v1/adapters/readers").json()["latest"] is None
    assert band.lease("carol") is None


def test_at_the_deadline_with_its_quorum_a_round_makes_a_version(band):
    band.begin("alice", "bob", "carol")
    band.train("alice", 1.0)
    band.train("bob", 2.0)
    band.past_deadline()
    band.work()
    assert (band.round()["state"], band.round()["updates"]) == ("published", 2)
    np.testing.assert_array_equal(band.b(), np.float32(1.5))


def test_a_round_in_which_nobody_can_answer_any_more_ends_at_once(band):
    band.begin("alice", "bob", quorum=2)
    band.train("alice", 1.0)
    lease = band.lease("bob")
    band.devices["bob"].post(f"/v1/leases/{lease['id']}/fail", json={"code": "broken", "detail": "no more"})
    band.work()
    assert band.round()["why"] == "1 updates had arrived when all members had answered; the quorum is 2"
    assert band.parts()["bob"]["state"] == "failed"


def test_weights_by_examples_are_capped(band):
    band.begin("alice", "bob", weights="examples", most_examples=30)
    band.train("alice", 1.0, train_examples=10)
    band.train("bob", 5.0, train_examples=10**9)
    band.work()
    np.testing.assert_array_equal(band.b(), np.float32((10 * 1 + 30 * 5) / 40))
    bob = band.parts()["bob"]
    assert (bob["claimed_examples"], bob["examples"]) == (10**9, 30)


def test_a_server_optimizer_remembers_from_round_to_round(band):
    band.create("alice", "bob", optimizer={"name": "momentum", "lr": 0.5, "beta1": 0.9})
    b, momentum = 0.0, 0.0
    for number, change in ((1, 2.0), (2, -1.0), (3, 0.5)):
        band.open()
        band.train_all(alice=b + change, bob=b + change)
        momentum = 0.9 * momentum + change
        b = float(np.float32(b + 0.5 * momentum))
        assert band.round(number)["state"] == "published"
        np.testing.assert_allclose(band.b(), b, rtol=1e-6)


def test_accuracy_of_the_start_is_the_mean_over_devices(band):
    band.begin("alice", "bob", "carol")
    band.train("alice", 1.0, zero_shot_accuracy=0.5, tuned_accuracy=0.7)
    band.train("bob", 1.0, zero_shot_accuracy=0.6, tuned_accuracy=0.8)
    band.train("carol", 1.0, zero_shot_accuracy=None, tuned_accuracy=None)
    band.work()
    view = band.round()
    assert view["measured"] == 2
    np.testing.assert_allclose((view["start_accuracy"], view["tuned_accuracy"]), (0.55, 0.75))
    version = band.app.get("/v1/adapters/readers/revisions/main").json()
    np.testing.assert_allclose(version["result"]["zero_shot_accuracy"], 0.55)
    assert version["result"]["tuned_accuracy"] is None


def test_rounds_that_open_by_themselves(band):
    band.create("alice", automatic=True, most_rounds=2)
    band.work()
    assert band.app.get(URL).json()["rounds"] == 0
    band.join("bob")
    for number in (1, 2):
        band.work()
        assert band.round(number)["state"] == "open"
        band.home.compile()
        band.train_all(alice=1.0, bob=1.0)
    band.work()
    assert band.app.get(URL).json()["rounds"] == 2
    assert [each["state"] for each in band.app.get(f"{URL}/rounds").json()["items"]] == ["published", "published"]


def test_a_person_ends_a_round(band):
    band.create("alice", "bob", "carol", automatic=True)
    band.work()
    band.home.compile()
    band.train("alice", 1.0)
    band.train("bob", 2.0)
    round_view = band.app.post(f"{URL}/rounds/1/close").json()
    assert round_view["state"] == "aggregating"
    assert band.app.post(f"{URL}/rounds/1/close").json()["state"] == "aggregating"
    band.work()
    band.work()
    assert (band.round()["state"], band.app.get(URL).json()["rounds"]) == ("published", 1)
    band.open()
    assert band.app.post(f"{URL}/rounds/2/close").json()["why"] == (
        "0 updates had arrived when it was closed; the quorum is 2"
    )


def test_a_person_approves_each_version(band, operator, problem):
    band.create(automatic=True)
    rule = {"rule": {"automatic": False}}
    assert operator.put("/v1/adapters/readers/rule", json=rule).status_code == 200
    band.join("alice", "bob")
    band.work()
    band.home.compile()
    band.train_all(alice=1.0, bob=1.0)
    band.work()
    assert band.round()["version"] == 1
    assert band.app.get("/v1/adapters/readers").json()["main"] is None
    problem(band.app.post(f"{URL}/rounds"), 409, "version-held")
    assert operator.post("/v1/adapters/readers/versions/1/approve").status_code == 200
    band.work()
    assert (band.round(2)["state"], band.round(2)["start_version"]) == ("open", 1)


def test_the_next_round_starts_from_what_was_promoted(band):
    band.create("alice", "bob")
    for value in (1.0, 2.0):
        band.open()
        band.train_all(alice=value, bob=value)
    assert band.app.post("/v1/adapters/readers/promote", json={"revision": "v1"}).status_code == 200
    assert band.open()["start_version"] == 1
    band.train_all(alice=4.0, bob=4.0)
    np.testing.assert_array_equal(band.b("v3"), np.float32(4.0))
    assert band.app.get("/v1/adapters/readers/revisions/v3").json()["parent"]["version"] == 1


def recipe_of(band, user):
    return band.app.get(f"/v1/jobs/{band.parts()[user]['job_id']}").json()["recipe"]


def test_members_have_the_estimator_of_their_device_and_one_a(band):
    """One device has the memory for a whole batch at once; the other declines until its job needs less."""
    view = band.create("alice", "bob", recipe={**JOB["recipe"], "estimator": "auto", "queries": None})
    band.devices["alice"].lease("movies", memory_bytes=10**9, capabilities={"cohorts": True})
    band.open()
    job = band.app.get(f"/v1/jobs/{band.parts()['alice']['job_id']}").json()
    assert "device alice-phone can spare 1,000 MB" in job["estimator_reason"]
    while (lease := band.lease("bob"))["job"]["recipe"].get("micro_batch") != 1:
        needed_bytes = lease["manifest"]["manifest"]["planned_bytes"] + 10**9
        body = {"needed_bytes": needed_bytes, "available_bytes": needed_bytes - 1}
        assert band.devices["bob"].post(f"/v1/leases/{lease['id']}/decline", json=body).status_code == 200
        band.home.compile()
    whole, parts = recipe_of(band, "alice"), recipe_of(band, "bob")
    assert (whole.get("micro_batch"), parts["micro_batch"]) == (None, 1)
    assert whole == view["recipe"]
    for recipe in (whole, parts):
        assert a_fingerprint(Recipe.model_validate(recipe), SHAPE) == view["a_sha256"]
    band.finish("bob", lease, 4.0)
    band.train_all(alice=1.0)
    assert band.round()["state"] == "published"
    np.testing.assert_array_equal(band.b(), np.float32(2.5))
    assert band.open()["start_version"] == 1


def test_private_members_have_one_estimator(band):
    privacy = {"examples": {"noise_multiplier": 1.0, "sampling_rate": 0.1}}
    recipe = {**JOB["recipe"], "estimator": "auto", "queries": None, "privacy": "clipped"}
    view = band.create("alice", "bob", recipe=recipe, privacy=privacy)
    band.devices["alice"].lease("movies", memory_bytes=1, capabilities={"cohorts": True})
    band.open()
    assert recipe_of(band, "alice") == view["recipe"]
