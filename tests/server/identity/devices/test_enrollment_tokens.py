"""One-time tokens and devices."""

from datetime import UTC, datetime, timedelta

import pytest

from server.identity.devices.service import EnrollmentToken
from shared.signing import new_private_key, public_text
from tests.server.homes import at_once


def enrollment(**changes):
    key = public_text(new_private_key().public_key())
    return {"name": "phone", "public_key": key, "platform": "linux"} | changes


@pytest.mark.both_databases
def test_of_many_at_once_one_gets_in(fleet, operator):
    token = operator.post("/v1/enrollments", json={}).json()["token"]
    actors = [fleet.actor(token) for _ in range(6)]
    answers = at_once(
        *(lambda number=number: actors[number].post("/v1/devices", json=enrollment()) for number in range(6))
    )
    assert sorted(answer.status_code for answer in answers) == [201] + [401] * 5
    assert len(operator.get("/v1/devices").json()["items"]) == 1


def test_a_token_that_is_over(fleet, home, operator, problem):
    token = operator.post("/v1/enrollments", json={"expires_in_seconds": 1}).json()["token"]
    home.change(EnrollmentToken, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    problem(fleet.actor(token).post("/v1/devices", json=enrollment()), 401, "unauthorized")


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"name": "No Spaces"}, 422, "invalid-request"),
        *(({"public_key": key}, 400, "bad-request") for key in ("", "!" * 44, "A" * 43, "AAAA", "é" * 44)),
    ],
)
def test_a_bad_request_does_not_use_the_token_up(fleet, operator, problem, changes, status, code):
    actor = fleet.actor(operator.post("/v1/enrollments", json={}).json()["token"])
    problem(actor.post("/v1/devices", json=enrollment(**changes)), status, code)
    assert actor.post("/v1/devices", json=enrollment()).status_code == 201
