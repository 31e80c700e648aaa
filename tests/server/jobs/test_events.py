"""A job's event stream: complete, in order, resumable, and over when the job is."""

import json

import pytest

from shared.job import JobView, Progress
from shared.transport import Transport


def read(actor, job_id, last=None):
    """(event, id, data) until the server ends the stream."""
    with Transport(str(actor.base_url), actor.token) as transport:
        return list(transport.events(f"/v1/jobs/{job_id}/events", last_event_id=last))


@pytest.fixture
def finished(fleet, app, device):
    job = fleet.ready_job(app)
    lease = device.lease()
    for step in (1, 2):
        device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training", "step": step, "steps": 3})
    device.finish(lease)
    return job["id"]


def test_everything_from_the_beginning(app, finished):
    events = read(app, finished)
    states = [json.loads(data)["state"] for event, _, data in events if event == "job"]
    assert states == ["queued", "compiling", "ready", "training", "succeeded"]
    assert [json.loads(data)["step"] for event, _, data in events if event == "progress"] == [1, 2]
    assert [int(number) for _, number, _ in events] == list(range(1, 8))
    for event, _, data in events:
        (JobView if event == "job" else Progress).model_validate_json(data)


def test_on_from_where_it_broke_off(app, finished):
    everything = read(app, finished)
    for after in (1, 4, 6):
        assert read(app, finished, str(after)) == everything[after:]
    assert read(app, finished, "7") == []


def test_as_it_happens(fleet, app, device, lease):
    job_id = lease["job"]["id"]
    with app.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "no-cache" in response.headers["cache-control"]
        lines = response.iter_lines()
        seen = []
        for line in lines:
            seen.append(line)
            if '"state":"training"' in line:
                app_view = app.post(f"/v1/jobs/{job_id}/cancel").json()
                assert app_view["state"] == "cancelled"
        assert any('"state":"cancelled"' in line for line in seen)


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "9" * 19, "9" * 21])
def test_a_last_event_id_that_is_none(app, finished, value):
    response = app.get(f"/v1/jobs/{finished}/events", headers={"Last-Event-ID": value})
    assert response.status_code in (400, 422)
    assert response.headers["content-type"] == "application/problem+json"


def test_an_idle_stream_holds_no_thread(fleet, app):
    jobs = [app.submit(adapter=f"a{number}")["id"] for number in range(60)]
    streams = [app.stream("GET", f"/v1/jobs/{job}/events") for job in jobs]
    opened = [stream.__enter__() for stream in streams]
    try:
        assert all(response.status_code == 200 for response in opened)
        # More streams than the thread pool has threads, and the server still answers.
        assert app.get(f"/v1/jobs/{jobs[0]}").status_code == 200
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)
