"""Promoting, rolling back, tagging, deprecating, deleting and taking back; and the trail that they leave."""

import itertools

import pytest

from server.registry.decisions import DecisionService
from server.registry.models import Actor, StoredEvent
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


def test_main_is_promoted_and_rolled_back(app, publish, decide, three, problem):
    assert main(decide) == 3
    assert decide("POST", "/rollback", {"reason": "bad answers"})["main"] == 2
    assert decide("GET", "/revisions/main")["revision"] == three[1]["revision"]
    assert decide("POST", "/rollback", {})["main"] == 1  # back again, not forth
    problem(app.post(f"{URL}/rollback", json={}), 409, "conflict")
    assert decide("POST", "/promote", {"revision": three[1]["revision"][:8]})["main"] == 2
    assert decide("POST", "/rollback", {"revision": "1"})["main"] == 1
    assert decide("POST", "/promote", {"revision": "main"})["main"] == 1  # which leaves no line
    publish()
    assert main(decide) == 4
    assert trail(decide) == [
        ("published", 1, None, 1),
        ("published", 2, 1, 2),
        ("published", 3, 2, 3),
        ("rolled-back", 2, 3, 2),
        ("rolled-back", 1, 2, 1),
        ("promoted", 2, 1, 2),
        ("rolled-back", 1, 2, 1),
        ("published", 4, 1, 4),
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


def test_an_adapter_that_changed_meanwhile(app, publish, decide, three, problem):
    stale = app.get(URL).headers["etag"]
    fresh = decide("POST", "/promote", {"revision": "v1"}, **{"If-Match": stale})
    for ask in (
        app.build_request("POST", f"{URL}/promote", json={"revision": "v2"}),
        app.build_request("POST", f"{URL}/rollback", json={}),
        app.build_request("PUT", f"{URL}/tags/x", json={"revision": "v2"}),
        app.build_request("DELETE", f"{URL}/tags/x"),
        app.build_request("DELETE", URL),
    ):
        ask.headers["If-Match"] = stale
        problem(app.send(ask), 412, "precondition-failed")
    assert decide("GET", "") == fresh
    version = app.get(f"{URL}/versions/1").headers["etag"]
    decide("POST", "/versions/1/deprecate", {"message": "old"}, **{"If-Match": version})
    for path in ("approve", "reject"):
        problem(app.post(f"{URL}/versions/1/{path}", headers={"If-Match": version}), 412, "precondition-failed")
    problem(app.delete(f"{URL}/versions/1", headers={"If-Match": version}), 412, "precondition-failed")


def test_tags_are_made_moved_and_deleted(app, decide, three, problem):
    assert decide("PUT", "/tags/stable", {"revision": "v1"})["tags"] == {"stable": 1}
    assert decide("PUT", "/tags/stable", {"revision": "main"})["tags"] == {"stable": 3}
    assert decide("PUT", "/tags/beta", {"revision": "stable"})["tags"] == {"beta": 3, "stable": 3}
    assert decide("GET", "/revisions/beta")["version"] == 3
    assert app.get("/v1/adapters").json()["items"][0]["tags"] == {"beta": 3, "stable": 3}
    decide("DELETE", "/tags/beta?reason=done")
    problem(app.get(f"{URL}/revisions/beta"), 404, "revision-not-found")
    problem(app.delete(f"{URL}/tags/beta"), 404, "revision-not-found")
    decide("DELETE", "/versions/3")
    problem(app.get(f"{URL}/revisions/stable"), 404, "revision-not-found")
    assert decide("GET", "")["tags"] == {}
    decide("POST", "/versions/3/undelete")
    assert decide("GET", "")["tags"] == {"stable": 3}


def test_names_that_no_tag_may_have(app, three, problem):
    for tag in ("main", "HEAD", "v7", "7", "1234567", "deadbeef", "-x", ".x", "a b", "x" * 97):
        problem(app.put(f"{URL}/tags/{tag}", json={"revision": "v1"}), 422, "invalid-request")


def test_tags_are_not_without_number(app, home, three, problem):
    with home.database.writing() as session:
        decisions = DecisionService(session, Actor("x"), "default", "alice-movies")
        for number in range(100):
            decisions.tag(f"tag-{number}", "v1", "")
    problem(app.put(f"{URL}/tags/more", json={"revision": "v1"}), 409, "conflict")
    assert app.put(f"{URL}/tags/tag-3", json={"revision": "v2"}).status_code == 200


def test_a_deprecated_version_is_still_to_be_had(app, decide, three):
    assert decide("POST", "/versions/3/deprecate", {"message": "rude"})["message"] == "rude"
    assert main(decide) == 2
    revision = decide("GET", "/revisions/v3")
    assert (revision["state"], revision["message"]) == ("deprecated", "rude")
    for version in (2, 1):
        decide("POST", f"/versions/{version}/deprecate", {"message": "old"})
    assert main(decide) == 1  # nothing better is left, and who pulls `main` is not cut off
    decide("POST", "/versions/3/approve")
    assert main(decide) == 3
    assert [item["version"] for item in decide("GET", "/versions?state=deprecated")["items"]] == [2, 1]


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
    assert decide("POST", "/rollback", {})["main"] == before["main"]
    assert decide("GET", "/events")["items"][3]["reason"] == "account closed"


@pytest.mark.both_databases
def test_decisions_of_two_at_once_follow_each_other(home, decide, three):
    """Each line goes on from the one before, whoever was first."""

    def promote(who):
        for turn in range(6):
            with home.database.writing() as session:
                decisions = DecisionService(session, Actor(f"token-{who}"), "default", "alice-movies")
                decisions.promote(f"v{1 + (turn + who) % 3}", "")

    at_once(lambda: promote(0), lambda: promote(1))
    with home.database.reading() as session:
        rows = session.query(StoredEvent).order_by(StoredEvent.number).all()
        moves = [(row.main_before, row.main_after) for row in rows]
    assert all(later[0] == earlier[1] for earlier, later in itertools.pairwise(moves))
    assert moves[-1][1] == main(decide)
