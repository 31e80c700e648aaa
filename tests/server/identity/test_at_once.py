"""Bounds and names hold for requests that arrive at once: what a check finds cannot change before the effect."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from server.jobs import events
from shared.errors import TooManyRequests
from tests.server.conftest import job_request
from tests.server.federation.conftest import cohort_request

pytestmark = pytest.mark.both_databases
AT_ONCE = 8


def at_once(call, arguments):
    """Calls a function with each of the arguments at the same time; the results."""
    start = threading.Barrier(len(arguments))

    def wait_and_call(argument):
        start.wait()
        return call(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(wait_and_call, arguments))


def test_a_new_adapter_name_is_one_user_s(app):
    users = [f"user-{number}" for number in range(AT_ONCE)]
    statuses = at_once(lambda user: app.post("/v1/jobs", json=job_request(user=user)).status_code, users)
    assert sorted(statuses) == [202] + [409] * (AT_ONCE - 1)


def test_a_new_name_is_a_cohort_s_or_a_user_s(app):
    calls = [("/v1/cohorts", cohort_request(name="readers")), ("/v1/jobs", job_request(adapter="readers"))] * 2
    answers = at_once(lambda call: (call[0], app.post(call[0], json=call[1]).status_code), calls)
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


def test_a_job_for_a_deleted_adapter_is_refused(fleet, app, device, lease, problem):
    device.finish(lease)
    assert app.delete("/v1/adapters/alice-movies").status_code < 300
    assert "deleted" in problem(app.post("/v1/jobs", json=job_request()), 409, "conflict")["detail"]
