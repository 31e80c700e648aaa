"""A server that is told to stop while it is busy: real processes, everyone answered, nothing kept."""

import contextlib
import json
import re
import signal
import socket
import threading
from urllib.parse import urlsplit

import httpx
from sqlalchemy import select

from server.jobs.repository import Job
from server.programs.service import Program, ProgramState
from shared.job import JobState
from tests.server.actors import Fleet, job_request
from tests.server.homes import eventually
from tests.server.operations.test_serving import PATIENCE, family, running, wait_for_exit


@contextlib.contextmanager
def half_a_request(url, token, body):
    """A submission of which the last byte has not been sent; calling what this yields sends it: the answer's head."""
    state = urlsplit(url)
    with socket.create_connection((state.hostname, state.port), timeout=PATIENCE) as link:
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        )
        link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-1])

        def rest():
            link.sendall(body[-1:])
            return link.recv(65536).partition(b"\r\n")[0]

        yield rest


def running_requests(home, url):
    """How many the server answers just now, this question among them."""
    text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {home.token('operator')}"}).text
    return int(float(re.search(r"^mobizo_http_requests_running (.*)$", text, re.MULTILINE).group(1)))


def connection_refused(url):
    try:
        httpx.get(f"{url}/healthz", timeout=PATIENCE)
    except httpx.TransportError as error:  # others than this one meet the listener while it closes
        return isinstance(error, httpx.ConnectError)
    return False


def test_everyone_is_answered(home):
    home.settings = home.settings.model_copy(update={"grace_seconds": 60})
    home.behave(hang=True)
    with running(home) as (process, url):
        fleet = Fleet(home, url)
        app, device = fleet.app(), fleet.device()
        job = app.submit()
        eventually(home.starts)
        children = family(process)
        assert len(children) == 2  # worker and compiler
        responses, events = [], []

        def wait_for_work():
            responses.append(device.post("/v1/leases", json={"datasets": ["movies"], "wait_seconds": 30}))

        def follow():
            with app.stream("GET", f"/v1/jobs/{job['id']}/events", timeout=PATIENCE) as response:
                events.extend(line for line in response.iter_lines() if line.startswith("event:"))
            responses.append(response)

        threads = [threading.Thread(target=wait_for_work), threading.Thread(target=follow)]
        for thread in threads:
            thread.start()
        operator = fleet.operator()
        metric_lines = ("mobizo_polls_open 1.0", "mobizo_event_streams_open 1.0")
        eventually(lambda: all(line in operator.get("/metrics").text for line in metric_lines))
        body = json.dumps(job_request(adapter="late", recipe={"rank": 3})).encode()
        with half_a_request(url, app.token, body) as rest:
            eventually(lambda: running_requests(home, url) == 4)
            process.send_signal(signal.SIGTERM)
            for thread in threads:
                thread.join(PATIENCE)
            eventually(lambda: connection_refused(url))
            # All others were answered; this one is what the server still stays for.
            assert process.poll() is None
            assert rest() == b"HTTP/1.1 202 Accepted"
        assert process.wait(PATIENCE) == 0
        wait_for_exit(children)
        assert sorted(response.status_code for response in responses) == [200, 204]
        assert events
        fleet.close()
    with home.database.reading() as session:
        assert session.scalars(select(Job.state)).all() == [JobState.QUEUED, JobState.QUEUED]
        program = session.scalars(select(Program).order_by(Program.number)).first()
        # Given back, and a try that the server broke off is no failed one.
        assert program.state is ProgramState.PENDING


def test_who_does_not_end_is_cut_off_after_the_grace(home):
    home.settings = home.settings.model_copy(update={"grace_seconds": 1})
    body = json.dumps(job_request()).encode()
    with running(home, "--workers", "0") as (process, url), half_a_request(url, home.token("app"), body):
        eventually(lambda: running_requests(home, url) == 2)
        process.terminate()
        assert process.wait(PATIENCE) == 0


def test_a_second_signal_exits_at_once(home):
    home.settings = home.settings.model_copy(update={"grace_seconds": 600})
    home.behave(hang=True)
    with running(home) as (process, url):
        token = home.token("app")
        httpx.post(f"{url}/v1/jobs", json=job_request(), headers={"Authorization": f"Bearer {token}"})
        eventually(home.starts)
        children = family(process)
        with half_a_request(url, token, b"{}"):
            eventually(lambda: running_requests(home, url) == 2)
            process.send_signal(signal.SIGTERM)
            eventually(lambda: connection_refused(url))
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 128 + signal.SIGINT
        wait_for_exit(children)
