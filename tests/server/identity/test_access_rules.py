"""Tokens that open nothing, what is kept of tokens, and tenants apart. Who may ask which route: test_matrix.py."""

import pytest
from sqlalchemy import select

from server.identity.tokens import Token, TokenService
from tests.server.actors import job_request


@pytest.mark.parametrize("value", [None, "Bearer", "Basic eDp5", f"Bearer mobizo-app-{'x' * 43}"])
def test_tokens_that_are_none(fleet, problem, value):
    answer = fleet.actor().get("/v1/jobs", headers={"Authorization": value} if value else {})
    problem(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_only_digests_are_stored(home):
    with home.database.writing() as session:
        token, text = TokenService(session).issue("app", "default", "mine")
        assert len(token.digest) == 64
    with home.database.reading() as session:
        row = str(session.execute(select(Token.__table__).where(Token.id == token.id)).one())
    assert token.digest in row
    assert text.removeprefix("mobizo-app-") not in row


def test_no_job_is_for_a_foreign_device(fleet, device, problem):
    body = job_request(device=device.device_id)
    problem(fleet.app("other").post("/v1/jobs", json=body), 404, "not-found")


def test_a_shared_recipe_shares_nothing_else(fleet, device, lease):
    device.finish(lease)
    stranger = fleet.app("other")
    job = stranger.submit()
    assert job["state"] == "ready"
    assert job["recipe_id"] == lease["job"]["recipe_id"]
    assert [item["id"] for item in stranger.get("/v1/jobs").json()["items"]] == [job["id"]]
    assert stranger.get("/v1/adapters").json()["items"] == []
    device = fleet.device("other")
    assert device.lease()["job"]["id"] == job["id"]
    device.finish(device.lease())
    assert stranger.get("/v1/adapters/alice-movies").json()["versions"] == 1
