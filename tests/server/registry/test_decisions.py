"""Promoting, deleting and taking back; and the trail that they leave."""

import itertools
from types import SimpleNamespace

import pytest

from server.registry.decisions import DecisionService
from server.registry.models import StoredEvent
from tests.server.actors import job_request
from tests.server.homes import at_once
from tests.server.registry.conftest import URL


@pytest.fixture
def three(publish):
    """Three approved versions."""
    return [publish(value) for value in (0.25, 0.5, 0.75)]


def main(decide):
    return decide("GET", "")["main"]


def trail(decide):
    return [
        (event["action"], event["version"], event["main_before"], event["main_after"])
        for event in decide("GET", "/events")["items"]
    ][::-1]


def test_main_is_promoted(publish, decide, three):
    assert main(decide) == 3
    assert decide("POST", "/promote", {"revision": three[1]["revision"][:8]})["main"] == 2
    assert decide("GET", "/revisions/main")["revision"] == three[1]["revision"]
    assert decide("POST", "/promote", {"revision": "main"})["main"] == 2  # which leaves no line
    publish()
    assert main(decide) == 4
    assert trail(decide) == [
        ("published", 1, None, 1),
        ("published", 2, 1, 2),
        ("published", 3, 2, 3),
        ("promoted", 2, 3, 2),
        ("published", 4, 2, 4),
    ]


@pytest.mark.both_databases
def test_who_did_it_and_why(fleet, app, device, decide, three):
    decide("POST", "/promote", {"revision": "v1", "reason": "the others were slow"})
    first, *_, last = decide("GET", "/events")["items"][::-1]
    assert (first["actor"], first["name"], first["user"]) == (device.device_id, "", None)
    assert last["actor"] == app.get("/v1/whoami").json()["token_id"]
    assert last["reason"] == "the others were slow"
    page = app.get(f"{URL}/events?limit=3").json()
    rest = app.get(f"{URL}/events?limit=3&cursor={page['next']}").json()
    assert len(page["items"] + rest["items"]) == 4
    assert rest["next"] is None


def test_a_deleted_version_and_its_way_back(app, decide, three, problem):
    deleted = decide("DELETE", "/versions/3?reason=private")
    assert (deleted["state"], main(decide)) == ("deleted", 2)
    assert decide("DELETE", "/versions/3") == deleted
    for path in ("versions/3", "revisions/v3", f"revisions/{three[2]['revision']}", "versions/3/peft"):
        problem(app.get(f"{URL}/{path}"), 404, "revision-not-found")
    problem(app.post(f"{URL}/versions/3/approve"), 404, "revision-not-found")
    assert [item["version"] for item in decide("GET", "/versions?state=deleted")["items"]] == [3]
    assert [item["version"] for item in decide("GET", "/versions")["items"]] == [3, 2, 1]
    assert decide("GET", "")["latest"]["version"] == 2
    back = decide("POST", "/versions/3/undelete")
    assert (back["state"], back["removed_after"], main(decide)) == ("approved", None, 2)
    for version in (3, 2, 1):
        decide("DELETE", f"/versions/{version}")
    adapter = decide("GET", "")
    assert (adapter["latest"], adapter["main"], adapter["versions"]) == (None, None, 3)
    decide("POST", "/versions/1/undelete")
    assert main(decide) == 1


def test_a_deleted_adapter_and_its_way_back(fleet, app, device, decide, three, problem):
    before = decide("GET", "")
    fleet.ready_job(app)
    lease = device.lease()
    deleted = decide("DELETE", "?reason=account+closed")
    assert deleted["removed_after"]
    problem(app.get(URL), 404, "adapter-not-found")
    problem(app.get(f"{URL}/versions/1"), 404, "adapter-not-found")
    problem(app.delete(URL), 404, "adapter-not-found")
    assert app.get("/v1/adapters").json()["items"] == []
    assert app.get("/v1/adapters?deleted=true").json()["items"] == [deleted]
    assert device.finish(lease, 0.5)["version"] == 4  # what a device brings meanwhile is not lost
    problem(app.post("/v1/jobs", json=job_request()), 409, "conflict")
    assert decide("POST", "/undelete")["versions"] == 4
    assert decide("POST", "/promote", {"revision": "v3"})["main"] == before["main"]
    assert decide("GET", "/events")["items"][3]["reason"] == "account closed"


@pytest.mark.both_databases
def test_decisions_of_two_at_once_follow_each_other(home, decide, three):
    """Each line goes on from the one before, whoever was first."""

    def promote(who):
        person = SimpleNamespace(tenant="default", token_id=f"token-{who}", name="", user=None)
        for turn in range(6):
            with home.database.writing() as session:
                decisions = DecisionService(session, person, "alice-movies")
                decisions.promote(f"v{1 + (turn + who) % 3}", "")

    at_once(lambda: promote(0), lambda: promote(1))
    with home.database.reading() as session:
        rows = session.query(StoredEvent).order_by(StoredEvent.number).all()
        moves = [(row.main_before, row.main_after) for row in rows]
    assert all(later[0] == earlier[1] for earlier, later in itertools.pairwise(moves))
    assert moves[-1][1] == main(decide)
