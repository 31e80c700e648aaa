"""Requests that are sent again: answered as before, done once."""

from datetime import timedelta

import pytest
from sqlalchemy import func, select

from server.app import SLICES
from server.database.columns import utc_now
from server.identity.devices import repository as devices
from server.web.idempotency import IdempotencyRecord, ResponseRecorder, keep_once
from server.web.routes import Route
from server.worker import purge_expired
from shared.signing import new_private_key, public_text
from tests.server.actors import job_request
from tests.server.homes import at_once

KEY = {"Idempotency-Key": "3f6c-1"}


def count(home, table):
    return home.scalar(select(func.count()).select_from(table))


def jobs(app):
    return [job["id"] for job in app.get("/v1/jobs").json()["items"]]


def test_the_same_again_is_answered_again_and_not_done_again(app):
    first = app.post("/v1/jobs", json=job_request(), headers=KEY)
    second = app.post("/v1/jobs", json=job_request(), headers=KEY)
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert (second.status_code, second.content) == (202, first.content)
    assert second.headers["location"] == first.headers["location"] == f"/v1/jobs/{first.json()['id']}"
    assert second.headers["content-type"] == first.headers["content-type"]
    assert second.headers["x-request-id"] != first.headers["x-request-id"]
    assert jobs(app) == [first.json()["id"]]


def test_an_answer_that_cannot_be_kept_leaves_nothing_done(app, home, problem, monkeypatch):
    """Effect and answer are one transaction: there is no moment in which a kill could part them."""

    def explode(recorder, answer):
        assert answer.status_code == 202
        raise RuntimeError

    monkeypatch.setattr(ResponseRecorder, "keep", explode)
    problem(app.post("/v1/jobs", json=job_request(), headers=KEY), 500, "internal-error")
    monkeypatch.undo()
    assert (jobs(app), count(home, IdempotencyRecord)) == ([], 0)
    assert "idempotency-replayed" not in app.post("/v1/jobs", json=job_request(), headers=KEY).headers


def test_a_key_names_one_request(app, problem):
    app.post("/v1/jobs", json=job_request(), headers=KEY)
    problem(app.post("/v1/jobs", json=job_request(adapter="b"), headers=KEY), 422, "idempotency-key-reused")
    problem(app.post("/v1/jobs?x=1", json=job_request(), headers=KEY), 422, "idempotency-key-reused")
    assert len(jobs(app)) == 1


def test_a_key_is_of_one_token(fleet, app):
    other, foreign = fleet.app(), fleet.app("other")
    ids = {actor.post("/v1/jobs", json=job_request(), headers=KEY).json()["id"] for actor in (app, other, foreign)}
    assert len(ids) == 3


def test_what_was_refused_may_be_tried_again(app, home, problem):
    problem(app.post("/v1/jobs", json=job_request(base="none"), headers=KEY), 404, "unknown-base")
    problem(app.post("/v1/jobs", json={}, headers=KEY), 422, "invalid-request")
    assert count(home, IdempotencyRecord) == 0
    assert app.post("/v1/jobs", json=job_request(), headers=KEY).status_code == 202


@pytest.mark.parametrize("key", ["", "a b", "x" * 129, "é".encode("latin-1")])
def test_keys_that_are_none(app, problem, key):
    answer = app.post("/v1/jobs", json=job_request(), headers={"Idempotency-Key": key})
    document = problem(answer, 422, "invalid-request")
    assert document["errors"][0]["field"] == "header.Idempotency-Key"
    assert jobs(app) == []


@pytest.mark.both_databases
def test_many_at_once_make_one(fleet, app):
    actors = [fleet.actor(app.token) for _ in range(8)]
    answers = at_once(
        *(lambda actor=actor: actor.post("/v1/jobs", json=job_request(), headers=KEY) for actor in actors)
    )
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotency-replayed" in answer.headers for answer in answers) == len(actors) - 1
    assert len(jobs(app)) == 1


def test_once_its_time_is_over_an_answer_is_forgotten(app, home):
    first = app.post("/v1/jobs", json=job_request(), headers=KEY).json()["id"]
    for number in range(3):
        app.post("/v1/jobs", json=job_request(), headers={"Idempotency-Key": f"old-{number}"})
    home.change(IdempotencyRecord, kept_until=utc_now() - timedelta(seconds=1))
    assert app.post("/v1/jobs", json=job_request(), headers=KEY).json()["id"] != first
    app.post("/v1/jobs", json=job_request(), headers={"Idempotency-Key": "new"})
    purge_expired(home.database)
    assert count(home, IdempotencyRecord) == 2


def test_an_enrollment_whose_answer_was_lost_is_had_again(fleet, home, operator):
    invitation = operator.post("/v1/enrollments", json={}, headers=KEY).json()
    assert operator.post("/v1/enrollments", json={}, headers=KEY).json() == invitation
    body = {"name": "phone", "public_key": public_text(new_private_key().public_key()), "platform": "linux"}
    newcomer = fleet.actor(invitation["token"])
    grant = newcomer.post("/v1/devices", json=body, headers=KEY).json()
    assert newcomer.post("/v1/devices", json=body, headers=KEY).json() == grant
    assert newcomer.post("/v1/devices", json=body).status_code == 401
    assert count(home, devices.Device) == 1
    assert fleet.actor(grant["token"]).post("/v1/leases", json={"datasets": []}).status_code == 204


def test_no_token_is_kept_in_clear(home, operator):
    token = operator.post("/v1/enrollments", json={}, headers=KEY).json()["token"]
    assert count(home, IdempotencyRecord) == 1
    with home.database.reading() as session:
        record = session.scalars(select(IdempotencyRecord)).one()
        stored = b" ".join(repr(getattr(record, column.key)).encode() for column in IdempotencyRecord.__table__.columns)
    for secret in (token, operator.token, KEY["Idempotency-Key"]):
        assert secret.encode() not in stored


def test_every_route_reads_and_answers_alike():
    routes = [route for slice_ in SLICES for route in slice_.router.routes]
    assert all(isinstance(route, Route) for route in routes)
    makers = {
        (route.path, *route.methods)
        for route in routes
        if keep_once in [child.call for child in route.dependant.dependencies]
    }
    # What makes something new with each request takes a key; the other POSTs may be sent twice as they are.
    assert {("/v1/jobs", "POST"), ("/v1/enrollments", "POST"), ("/v1/devices", "POST")} <= makers
    assert all(route.status_code not in (201, 202) or (route.path, *route.methods) in makers for route in routes)
