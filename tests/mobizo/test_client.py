"""The client behind a connection that loses responses: retried requests take effect once."""

import httpx

from mobizo import Client
from shared.job import JobRequest
from tests.http_server import Handler, http_server
from tests.server.actors import job_request


class LossyProxy(Handler):
    """Forwards POSTs, and drops the first response of each path."""

    def post(self):
        response = httpx.post(self.server.target + self.path, content=self.body(), headers=dict(self.headers))
        drop = self.path not in self.server.requested_paths
        self.server.requested_paths.append(self.path)
        if drop:
            self.close_connection = True
        else:
            self.answer(response.status_code, response.content, Content_Type=response.headers["content-type"])


def test_a_lost_response_does_not_duplicate_a_job(fleet, app):
    request = JobRequest.model_validate(job_request())
    proxy = http_server(LossyProxy, target=fleet.url, requested_paths=[])
    with proxy as server, Client(server.url, app.token) as client:
        job = client.jobs.submit(request)
        other = client.jobs.submit(request)
    assert server.requested_paths == ["/v1/jobs"] * 3
    assert [item["id"] for item in app.get("/v1/jobs").json()["items"]] == [other.id, job.id]
