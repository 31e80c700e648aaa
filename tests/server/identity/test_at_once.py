"""Bounds and names hold for requests that arrive at once: what a check finds cannot change before the effect."""

import asyncio

import httpx
import pytest

from server.jobs import events
from shared.errors import TooManyRequests
from tests.server.actors import job_request
from tests.server.federation.conftest import cohort_request
from tests.server.homes import at_once

pytestmark = pytest.mark.both_databases
AT_ONCE = 8


def test_a_new_adapter_name_is_one_user_s(app):
    bodies = [job_request(user=f"user-{number}") for number in range(AT_ONCE)]
    statuses = at_once(*(lambda body=body: app.post("/v1/jobs", json=body).status_code for body in bodies))
    assert sorted(statuses) == [202] + [409] * (AT_ONCE - 1)


def test_a_new_name_is_a_cohort_s_or_a_user_s(app):
    calls = [("/v1/cohorts", cohort_request(name="readers")), ("/v1/jobs", job_request(adapter="readers"))] * 2
    answers = at_once(*(lambda call=call: (call[0], app.post(call[0], json=call[1]).status_code) for call in calls))
    taken = {path for path, status in answers if status < 400}
    assert len(taken) == 1, answers
    assert sum(status < 400 for path, status in answers if path == "/v1/cohorts") <= 1


def test_event_streams_are_counted_before_they_open(fleet, app, monkeypatch):
    monkeypatch.setattr(events, "MAX_STREAMS", 3)
    job = app.submit()["id"]

    async def open_many():
        headers = {"Authorization": f"Bearer {app.token}"}
        async with httpx.AsyncClient(base_url=fleet.url, headers=headers, timeout=60) as client:

            async def open_one():
                request = client.build_request("GET", f"/v1/jobs/{job}/events")
                return await client.send(request, stream=True)

            answers = await asyncio.gather(*(open_one() for _ in range(12)))
            statuses = sorted(answer.status_code for answer in answers)
            for answer in answers:
                await answer.aclose()
            return statuses

    assert asyncio.run(open_many()) == [200] * 3 + [429] * 9


def test_a_reservation_ends_with_its_context(standing, fleet):
    feed = standing[0].state.mobizo.get(events.EventFeed)
    for _ in range(2 * events.MAX_STREAMS):
        with feed.reserved("token"):
            pass
    with pytest.raises(TooManyRequests):
        reserve(feed, events.MAX_STREAMS + 1)


def reserve(feed, more):
    if more:
        with feed.reserved("token"):
            reserve(feed, more - 1)
