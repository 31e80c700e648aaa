"""A job's event stream: complete, in order, resumable, and over when the job is."""

import itertools
import json
import socket

import fastapi.routing
import pytest

from server.identity.tokens import TokenService
from shared.job import JobView, Progress
from shared.transport import Transport


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
    events = read(app, finished_job_id)
    states = [json.loads(data)["state"] for event, _, data in events if event == "job"]
    assert states == ["queued", "compiling", "ready", "training", "succeeded"]
    assert [json.loads(data)["step"] for event, _, data in events if event == "progress"] == [1, 2]
    assert [int(number) for _, number, _ in events] == list(range(1, 8))
    for event, _, data in events:
        (JobView if event == "job" else Progress).model_validate_json(data)


def test_on_from_where_it_broke_off(app, finished_job_id):
    everything = read(app, finished_job_id)
    for after in range(len(everything) + 1):
        assert read(app, finished_job_id, str(after)) == everything[after:]


def test_a_position_beyond_the_end_is_refused(app, finished_job_id, problem):
    """It is another job's, or of another server: waiting for it would lose what comes before."""
    events = f"/v1/jobs/{finished_job_id}/events"
    problem(app.get(events, headers={"Last-Event-ID": "8"}), 400, "bad-request")


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


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "9" * 19, "9" * 21])
def test_a_last_event_id_that_is_none(app, finished_job_id, value):
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
        with home.database.writing() as session:
            tokens = TokenService(session)
            tokens.revoke(tokens.principal(app.token).token_id)
        assert not any(line.startswith("data:") for line in lines)  # to its end: the server closed it
    assert app.get(f"/v1/jobs/{job}").status_code == 401


def test_a_reader_who_stops_reading_holds_nobody_up(fleet, app):
    """Its events wait on its own connection, not in the server."""
    slow = app.submit()["id"]
    host, port = fleet.url.removeprefix("http://").split(":")
    head = f"GET /v1/jobs/{slow}/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {app.token}\r\n\r\n"
    with socket.create_connection((host, int(port))) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.sendall(head.encode())
        fleet.home.compile()
        app.post(f"/v1/jobs/{slow}/cancel")
        states = [json.loads(data)["state"] for event, _, data in read(app, slow) if event == "job"]
    assert states[-1] == "cancelled"


def test_an_idle_stream_holds_no_thread(fleet, app):
    jobs = [app.submit(adapter=f"a{number}")["id"] for number in range(45)]
    streams = [app.stream("GET", f"/v1/jobs/{job}/events") for job in jobs]
    responses = [stream.__enter__() for stream in streams]
    try:
        assert all(response.status_code == 200 for response in responses)
        # More streams than the 40 threads of the pool, and the server still answers.
        assert app.get(f"/v1/jobs/{jobs[0]}").status_code == 200
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)
