"""A job's event stream: complete, in order, resumable, over when the job is, and without a thread of its own."""

import itertools
import json
from contextlib import ExitStack

import fastapi.routing
import pytest

from server.jobs import events
from shared.job import JobView, Progress
from shared.transport import Transport
from tests.server.homes import eventually


def read(actor, job_id, last=None):
    """(event, id, data) until the server ends the stream."""
    with Transport(str(actor.base_url), actor.token) as transport:
        return list(transport.events(f"/v1/jobs/{job_id}/events", last_event_id=last))


@pytest.fixture
def finished_job_id(fleet, app, device):
    job = fleet.ready_job(app)
    lease = device.lease()
    for step in (1, 2):
        device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training", "step": step, "steps": 3})
    device.finish(lease)
    return job["id"]


def test_everything_from_the_beginning(app, finished_job_id):
    received = read(app, finished_job_id)
    states = [json.loads(data)["state"] for event, _, data in received if event == "job"]
    assert states == ["queued", "compiling", "ready", "training", "succeeded"]
    assert [json.loads(data)["step"] for event, _, data in received if event == "progress"] == [1, 2]
    assert [int(number) for _, number, _ in received] == list(range(1, 8))
    for event, _, data in received:
        (JobView if event == "job" else Progress).model_validate_json(data)


def test_on_from_where_it_broke_off(app, finished_job_id):
    everything = read(app, finished_job_id)
    for after in range(len(everything) + 1):
        assert read(app, finished_job_id, str(after)) == everything[after:]


def test_as_it_happens(fleet, app, device, lease):
    job_id = lease["job"]["id"]
    with app.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "no-cache" in response.headers["cache-control"]
        lines = response.iter_lines()
        event_lines = []
        for line in lines:
            event_lines.append(line)
            if '"state":"training"' in line:
                app_view = app.post(f"/v1/jobs/{job_id}/cancel").json()
                assert app_view["state"] == "cancelled"
        assert any('"state":"cancelled"' in line for line in event_lines)


def test_a_last_event_id_that_is_none(app, finished_job_id):
    """One beyond the end is another job's, or of another server: waiting for it would lose what comes before."""
    for value in ("8", "x", "-1", "1.5", "9" * 19, "9" * 21):
        response = app.get(f"/v1/jobs/{finished_job_id}/events", headers={"Last-Event-ID": value})
        assert response.status_code in (400, 422)
        assert response.headers["content-type"] == "application/problem+json"


def test_silence_is_filled_for_proxies(app, monkeypatch):
    monkeypatch.setattr(fastapi.routing, "_PING_INTERVAL", 0.05)
    job = app.submit()["id"]
    with app.stream("GET", f"/v1/jobs/{job}/events") as response:
        comments = [line for line in itertools.islice(response.iter_lines(), 12) if line.startswith(":")]
    assert len(comments) >= 2


def test_a_stream_ends_soon_after_its_token(home, app):
    job = app.submit()["id"]
    with app.stream("GET", f"/v1/jobs/{job}/events") as response:
        lines = response.iter_lines()
        assert any(line.startswith("data:") for line in lines)
        home.revoke_token(app.token)
        assert not any(line.startswith("data:") for line in lines)  # to its end: the server closed it
    assert app.get(f"/v1/jobs/{job}").status_code == 401


STREAMS = 45  # more than the server has threads


def wait_for(entries, count):
    """Waits until a list has so many more entries."""
    target = len(entries) + count
    eventually(lambda: len(entries) >= target)


def open_stream(stack, actor, job):
    """The lines of a job's stream after its first event; the stream is closed when they are no longer referenced."""
    lines = stack.enter_context(actor.stream("GET", f"/v1/jobs/{job}/events")).iter_lines()
    assert any(line.startswith("data:") for line in lines)
    return lines


def test_streams_without_news_make_no_queries_of_their_own(app, standing, monkeypatch):
    reads, looks = [], []
    read_events, look = events._read, events._read_changes
    monkeypatch.setattr(events, "_read", lambda *arguments: reads.append(1) or read_events(*arguments))
    monkeypatch.setattr(events, "_read_changes", lambda *arguments: looks.append(len(arguments[1])) or look(*arguments))
    job = app.submit()["id"]
    with ExitStack() as stack:
        streams = [open_stream(stack, app, job) for _ in range(STREAMS)]
        assert len(streams) == STREAMS
        wait_for(looks, 3)
        assert max(looks) == STREAMS
        read_count = len(reads)
        wait_for(looks, 3)
        assert len(reads) == read_count
        app.post(f"/v1/jobs/{job}/cancel")
        assert read(app, job)[-1][0] == "job"
