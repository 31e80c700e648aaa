"""The client behind a connection that loses responses: retried requests take effect once."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from mobizo import Client
from shared.job import JobRequest
from tests.server.conftest import job_request


class LossyProxy(BaseHTTPRequestHandler):
    """Forwards POSTs, and drops the first response of each path."""

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        response = httpx.post(self.server.target + self.path, content=body, headers=dict(self.headers))
        drop = self.path not in self.server.requested_paths
        self.server.requested_paths.append(self.path)
        if drop:
            self.close_connection = True
            return
        self.send_response(response.status_code)
        self.send_header("Content-Length", str(len(response.content)))
        self.send_header("Content-Type", response.headers["content-type"])
        self.end_headers()
        self.wfile.write(response.content)


@contextlib.contextmanager
def lossy_proxy(url):
    server = ThreadingHTTPServer(("127.0.0.1", 0), LossyProxy)
    server.target, server.requested_paths = url, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", server.requested_paths
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_lost_response_does_not_duplicate_a_job(fleet, app):
    request = JobRequest.model_validate(job_request())
    with lossy_proxy(fleet.url) as (url, requested_paths), Client(url, app.token) as client:
        job = client.jobs.submit(request)
        other = client.jobs.submit(request)
    assert requested_paths == ["/v1/jobs"] * 3
    assert [item["id"] for item in app.get("/v1/jobs").json()["items"]] == [other.id, job.id]
