"""`python -m bench.server.load`: an app that submits jobs and devices that train them, as users of locust.

Reads its orders as the first line of standard input, prints the findings as JSON at the end. A device asks for a job
with a long-poll, sends heartbeats, uploads an adapter of the right size and asks again, and signs every request as
agents do. With `retry`, a request that gets no answer, or that the server cannot serve now, is repeated until it is
answered; the app then submits until it reads the line `enough`, and the load ends with the line `stop`.

locust patches the standard library when it is imported, so this module runs only in a process of its own.
"""

import json
import random
import sys
import time
import uuid
from collections import defaultdict
from typing import Any

import gevent
from gevent.event import Event
from locust import FastHttpUser, task
from locust.env import Environment
from locust.exception import StopUser

# The imports above patch sockets and threads, so they come before everything that uses them.
import numpy as np  # isort: skip
from bench.server.polls import CAPABILITIES, STEPS, Orders  # isort: skip
from bench.server.home import DATASET, RESULT  # isort: skip
from device_agent.protocol.client import jittered  # isort: skip
from shared.canonical import sha256_hex  # isort: skip
from shared.zo.lora import dump_adapter  # isort: skip
from shared.request_signature import RequestSigner  # isort: skip

WARM_UP = 10  # jobs
PATIENCE = 60.0  # seconds
AGAIN_SECONDS = 0.1
ORDERS = Orders.model_validate_json(sys.stdin.readline())
enough, over = Event(), Event()
seconds: dict[str, list[float]] = defaultdict(list)  # by kind of request
submitted: dict[str, str] = {}  # adapters by the id of the job
sent: dict[str, float] = {}  # when a job was submitted, by its adapter
errors: list[str] = []
waiting = list(ORDERS.devices)
counts = {"completed": 0, "sent_again": 0}


class ApiUser(FastHttpUser):
    """A user of the API with one token."""

    abstract = True
    host = ORDERS.url
    concurrency = 100
    signer: RequestSigner | None = None
    token = ORDERS.app

    def ask(self, kind: str, method: str, path: str, body: object, **headers: str) -> tuple[int, Any]:
        """Sends a request and records its seconds. Returns status and body; raises StopUser when the load is over."""
        data: Any = body if isinstance(body, bytes) else json.dumps(body).encode()
        content = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        headers |= {"Authorization": f"Bearer {self.token}", "Content-Type": content}
        while not over.is_set():
            # A repeated request is signed again, since the same signature twice would be a replay.
            signature = self.signer.headers(method, path, "", data) if self.signer else {}
            began = time.monotonic()
            with self.client.request(
                method, path, data=data, headers=headers | signature, catch_response=True
            ) as found:
                found.success()  # judged below
                status, text = found.status_code, found.text or ""
            if ORDERS.retry and status in (0, 429, 503):
                counts["sent_again"] += status == 0
                gevent.sleep(AGAIN_SECONDS)
                continue
            seconds[kind].append(time.monotonic() - began)
            if status == 0 or status >= 500 or status in (400, 401, 403, 404, 422, 429):
                errors.append(f"{kind}: {status} {text[:300]}")
                raise StopUser
            return status, json.loads(text) if text else None
        raise StopUser


class App(ApiUser):
    """Submits jobs: at a steady rate however long the answers take, or one after another until `enough`."""

    fixed_count = 1

    @task
    def submit_jobs(self) -> None:
        """Runs the whole load; ends it where a number of jobs is given."""
        if ORDERS.jobs is None:
            number = 0
            while not enough.is_set():
                self.submit(number)
                number += 1
                gevent.sleep(random.uniform(0.0, 0.1))
            raise StopUser
        gevent.sleep(ORDERS.ramp_seconds)
        # The first jobs of a server's life compile its statements.
        self.submit_steadily(range(WARM_UP))
        seconds.clear()
        self.submit_steadily(range(WARM_UP, WARM_UP + ORDERS.jobs))
        over.set()

    def submit_steadily(self, numbers: range) -> None:
        """Submits jobs at the given rate and waits until all jobs so far are completed."""
        began, greenlets = time.monotonic(), []
        for place, number in enumerate(numbers):
            gevent.sleep(max(began + place / ORDERS.rate - time.monotonic(), 0))
            greenlets.append(gevent.spawn(self.submit, number))
        gevent.joinall(greenlets)
        deadline = time.monotonic() + PATIENCE
        while counts["completed"] < len(sent) and time.monotonic() < deadline and not errors:
            gevent.sleep(AGAIN_SECONDS)

    def submit(self, number: int) -> None:
        """Submits one job."""
        body = ORDERS.job(number)
        sent[body["adapter"]] = time.monotonic()
        key = {"Idempotency-Key": str(uuid.uuid4())}
        submitted[self.ask("submission", "POST", "/v1/jobs", body, **key)[1]["id"]] = body["adapter"]


class Device(ApiUser):
    """Asks for jobs and pretends to train them."""

    fixed_count = len(ORDERS.devices)

    def on_start(self) -> None:
        """Takes the next credentials."""
        credentials = waiting.pop()
        self.token, self.signer = credentials.token, credentials.signer()

    @task
    def work(self) -> None:
        """Asks for one job and trains it."""
        wait, began = jittered(ORDERS.wait_seconds), time.monotonic()
        body = {"datasets": [DATASET], "capabilities": CAPABILITIES, "wait_seconds": wait}
        status, lease = self.ask("poll", "POST", "/v1/leases", body)
        now = time.monotonic()
        if status == 204:
            seconds["poll without a job"].append(now - began - wait)
            if not wait:
                gevent.sleep(AGAIN_SECONDS)
            return
        # A job that was ready before the device asked could not be given to it any sooner.
        seconds["job to a device"].append(now - max(sent[lease["job"]["request"]["adapter"]], began))
        # Not `+= self.train(lease)`, which reads the count before the lease and loses what others add meanwhile.
        if random.random() >= ORDERS.vanish and self.train(lease):
            counts["completed"] += 1

    def train(self, lease: dict[str, Any]) -> bool:
        """Speaks the protocol of one lease; returns whether the job was completed by it."""
        path = f"/v1/leases/{lease['id']}"
        for step in range(1, STEPS + 1):
            gevent.sleep(ORDERS.beat_seconds * random.uniform(0.8, 1.2))
            beat = {"phase": "training", "step": step, "steps": STEPS, "loss": 0.5}
            status, state = self.ask("heartbeat", "POST", f"{path}/heartbeat", beat)
            if status != 200 or state["stop"]:
                return False
        size = lease["manifest"]["manifest"]["size"]
        data = dump_adapter(np.full(size, random.random(), np.float32), {"job": lease["job"]["id"]})
        if self.ask("upload", "PUT", f"{path}/adapter", data)[0] != 200:
            return False
        done = {"adapter_sha256": sha256_hex(data), "result": RESULT.model_dump(mode="json")}
        return self.ask("completion", "POST", f"{path}/complete", done)[0] == 200


def listen() -> None:
    """Waits for the lines `enough` and `stop` of the parent process."""
    pool = gevent.get_hub().threadpool
    while line := pool.apply(sys.stdin.readline):
        enough.set()
        if line.strip() == "stop":
            break
    over.set()


def main() -> None:
    """Runs the load until it is over and prints the findings."""
    runner = Environment(user_classes=[App, Device]).create_local_runner()
    users = len(ORDERS.devices) + 1
    # Devices come back over some seconds, like a fleet after a restart of its server.
    runner.start(users, spawn_rate=users / max(ORDERS.ramp_seconds, 1))
    if ORDERS.jobs is None:
        gevent.spawn(listen)
    print("ready", flush=True)
    over.wait()
    runner.quit()
    print(json.dumps({"seconds": seconds, "errors": errors, "submitted": submitted, **counts}))


if __name__ == "__main__":
    main()
