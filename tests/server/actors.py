"""A running server for tests, and the clients that talk to it: apps, operators and devices."""

import contextlib
import json
import logging
import socket
import ssl
import threading
import time

import httpx
import numpy as np
import structlog
import uvicorn

from server.settings import Settings
from server.web.connections import KEEP_ALIVE_SECONDS, ConnectionLimits, DeadlineProtocol, Listener
from shared.access import Role
from shared.canonical import sha256_hex
from shared.request_signature import RequestSigner
from shared.signing import new_private_key, public_text
from shared.zo.lora import dump_adapter

TLS = ssl.create_default_context()  # one for all clients: making it is most of what a client costs
JOB = {
    "base": "tiny",
    "user": "alice",
    "adapter": "alice-movies",
    "task": "sst2",
    "dataset": "movies",
    "recipe": {"rank": 2, "sequence_length": 16, "queries": 1, "effective_batch": 2, "estimator": "replay"},
    "training": {"steps": 3},
}


def job_request(**changes):
    """A valid body of POST /v1/jobs; `recipe` and `training` are merged into the defaults."""
    body = json.loads(json.dumps(JOB))
    for name in ("recipe", "training"):
        body[name] |= changes.pop(name, {})
    return body | changes


def result(**changes):
    """A valid Result."""
    return {
        "steps": 3,
        "best_step": 2,
        "train_seconds": 1.0,
        "seconds": 2.0,
        "peak_rss_bytes": 1000,
        "train_examples": 10,
        "truncated_examples": 0,
        "evaluations": [],
        "zero_shot_accuracy": 0.5,
        "tuned_accuracy": 0.75,
    } | changes


def adapter_bytes(size, value=0.5):
    """A valid adapter file of `size` elements."""
    return dump_adapter(np.full(size, value, np.float32), {"job": "test"})


@contextlib.contextmanager
def serving(app, limits=None, plain=None):
    """The application answering on a free port, or on the listening socket `plain`; yields its URL."""
    # Errors only, and without pytest's locals in their tracebacks.
    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
    )
    listening = Listener(plain or socket.create_server(("127.0.0.1", 0)), limits or ConnectionLimits.of(Settings()))
    config = uvicorn.Config(
        app,
        http=DeadlineProtocol.of(listening),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,  # uvicorn's default is httpx's, so both could close at the same moment
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
        structlog.configure(**before)


def address_of(url):
    """Host and port of a server, for sockets."""
    place = httpx.URL(url)
    return place.host, place.port


class Actor(httpx.Client):
    """A client with one token."""

    def __init__(self, url, token=None):
        super().__init__(
            base_url=url, timeout=120, verify=TLS, headers={"Authorization": f"Bearer {token}"} if token else {}
        )
        self.device_id = None
        self.token = token
        self.signer = None  # of a device's key

    def send(self, request, **how):
        """Signs what a device sends, unless the test has signed it."""
        if self.signer is not None and request.method not in ("GET", "HEAD") and "signature" not in request.headers:
            path, _, query = request.url.raw_path.decode().partition("?")
            request.headers.update(self.signer.headers(request.method, path, query, request.read()))
        return super().send(request, **how)

    def submit(self, **changes):
        """A job, in the state in which it was answered."""
        response = self.post("/v1/jobs", json=job_request(**changes))
        assert response.status_code == 202, response.text
        return response.json()

    def lease(self, *datasets, **changes):
        """A lease, or None."""
        response = self.post("/v1/leases", json={"datasets": list(datasets or ("movies",)), **changes})
        assert response.status_code in (200, 204), response.text
        return response.json() if response.status_code == 200 else None

    def upload(self, lease, data=None):
        data = adapter_bytes(lease["manifest"]["manifest"]["size"]) if data is None else data
        return self.put(f"/v1/leases/{lease['id']}/adapter", content=data)

    def finish(self, lease, value=0.5, **changes):
        """Uploads and completes; the new version."""
        data = adapter_bytes(lease["manifest"]["manifest"]["size"], value)
        assert self.upload(lease, data).status_code == 200
        body = {"adapter_sha256": sha256_hex(data), "result": result(**changes)}
        response = self.post(f"/v1/leases/{lease['id']}/complete", json=body)
        assert response.status_code == 200, response.text
        return response.json()


class Fleet:
    """A running server and the actors that tests need."""

    def __init__(self, home, url):
        self.home, self.url = home, url
        self._actors = []

    def actor(self, token=None, signer=None):
        actor = Actor(self.url, token)
        actor.signer = signer
        self._actors.append(actor)
        return actor

    def app(self, tenant="default"):
        return self.actor(self.home.token(Role.APP, tenant))

    def operator(self, tenant="default"):
        return self.actor(self.home.token(Role.OPERATOR, tenant))

    def device(self, tenant="default", name="phone", users=("alice",)):
        operator = self.operator(tenant)
        token = operator.post("/v1/enrollments", json={"users": users}).json()["token"]
        key = new_private_key()
        body = {"name": name, "public_key": public_text(key.public_key()), "platform": "linux"}
        response = self.actor(token).post("/v1/devices", json=body)
        assert response.status_code == 201, response.text
        grant = response.json()
        device = self.actor(grant["token"])
        device.device_id = grant["device_id"]
        device.signer = RequestSigner(key, time.time)
        return device

    def ready_job(self, app, **changes):
        """A job whose program is compiled."""
        job = app.submit(**changes)
        self.home.compile()
        return app.get(f"/v1/jobs/{job['id']}").json()

    def close(self):
        for actor in self._actors:
            actor.close()


def assert_problem(response, status, code):
    """A problem document, whole."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["status"] == status
    assert document["code"] == code
    assert document["type"] == f"urn:mobizo:problem:{code}"
    assert document["title"]
    assert document["detail"]
    return document
