"""The client behind a connection that loses responses: retried requests take effect once."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from mobizo import Client
from shared.job import JobRequest
from tests.server.conftest import job_request


class Lossy(BaseHTTPRequestHandler):
    """Forwards POSTs, and drops the first response of each path."""

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = httpx.post(self.server.target + self.path, content=body, headers=dict(self.headers))
        lost = self.path not in self.server.asked
        self.server.asked.append(self.path)
        if lost:
            self.close_connection = True
            return
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(answer.content)))
        self.send_header("Content-Type", answer.headers["content-type"])
        self.end_headers()
        self.wfile.write(answer.content)


@contextlib.contextmanager
def lossy(url):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Lossy)
    server.target, server.asked = url, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", server.asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_lost_response_does_not_duplicate_a_job(fleet, app):
    request = JobRequest.model_validate(job_request())
    with lossy(fleet.url) as (url, asked), Client(url, app.token) as client:
        job = client.jobs.submit(request)
        other = client.jobs.submit(request)
    assert asked == ["/v1/jobs"] * 3
    assert [item["id"] for item in app.get("/v1/jobs").json()["items"]] == [other.id, job.id]


def test_a_lost_response_does_not_duplicate_an_enrollment_token(fleet, operator):
    with lossy(fleet.url) as (url, asked), Client(url, operator.token) as client:
        invitation = client.devices.create_enrollment_token()
    assert asked == ["/v1/enrollments"] * 2
    assert invitation.token.startswith("mobizo-enroll-")
