"""`python -m bench.server.load`: an app that submits jobs and devices that train them, as users of locust.

Reads its settings as the first line of standard input, prints the findings as JSON at the end. A device asks for a job
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
from bench.server.polls import CAPABILITIES, STEPS, LoadSettings  # isort: skip
from bench.server.home import DATASET, RESULT  # isort: skip
from device_agent.protocol.client import jittered  # isort: skip
from shared.canonical import sha256_hex  # isort: skip
from shared.zo.lora import dump_adapter  # isort: skip
from shared.request_signature import RequestSigner  # isort: skip

WARM_UP = 10  # jobs
COMPLETION_SECONDS = 60.0  # limit until all submitted jobs are completed
RETRY_SECONDS = 0.1
SETTINGS = LoadSettings.model_validate_json(sys.stdin.readline())
submission_ended, load_ended = Event(), Event()
seconds: dict[str, list[float]] = defaultdict(list)  # by kind of request
adapters_by_job: dict[str, str] = {}  # adapters by the id of the job
submitted_at: dict[str, float] = {}  # when a job was submitted, by its adapter
errors: list[str] = []
free_credentials = list(SETTINGS.devices)
counts = {"completed": 0}


class ApiUser(FastHttpUser):
    """A user of the API with one token."""

    abstract = True
    host = SETTINGS.url
    concurrency = 100
    signer: RequestSigner | None = None
    token = SETTINGS.app

    def send(self, kind: str, method: str, path: str, body: object, **headers: str) -> tuple[int, Any]:
        """Sends a request and records its seconds. Returns status and body; raises StopUser when the load is over."""
        data: Any = body if isinstance(body, bytes) else json.dumps(body).encode()
        content = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        headers |= {"Authorization": f"Bearer {self.token}", "Content-Type": content}
        while not load_ended.is_set():
            # A repeated request is signed again, since the same signature twice would be a replay.
            signature = self.signer.headers(method, path, "", data) if self.signer else {}
            start = time.monotonic()
            with self.client.request(
                method, path, data=data, headers=headers | signature, catch_response=True
            ) as response:
                response.success()  # judged below
                status, text = response.status_code, response.text or ""
            if SETTINGS.retry and status in (0, 429, 503):
                gevent.sleep(RETRY_SECONDS)
                continue
            seconds[kind].append(time.monotonic() - start)
            if status == 0 or status >= 500 or status in (400, 401, 403, 404, 422, 429):
                errors.append(f"{kind}: {status} {text[:300]}")
                raise StopUser
            return status, json.loads(text) if text else None
        raise StopUser


class App(ApiUser):
    """Submits jobs: at a fixed rate regardless of response times, or one after another until the line `enough`."""

    fixed_count = 1

    @task
    def submit_jobs(self) -> None:
        """Runs the whole load; ends it where a number of jobs is given."""
        if SETTINGS.jobs is None:
            number = 0
            while not submission_ended.is_set():
                self.submit(number)
                number += 1
                gevent.sleep(random.uniform(0.0, 0.1))
            raise StopUser
        gevent.sleep(SETTINGS.ramp_seconds)
        # The first jobs of a server's life compile its statements.
        self.submit_steadily(range(WARM_UP))
        seconds.clear()
        self.submit_steadily(range(WARM_UP, WARM_UP + SETTINGS.jobs))
        load_ended.set()

    def submit_steadily(self, numbers: range) -> None:
        """Submits jobs at the given rate and waits until all jobs so far are completed."""
        start, greenlets = time.monotonic(), []
        for index, number in enumerate(numbers):
            gevent.sleep(max(start + index / SETTINGS.rate - time.monotonic(), 0))
            greenlets.append(gevent.spawn(self.submit, number))
        gevent.joinall(greenlets)
        deadline = time.monotonic() + COMPLETION_SECONDS
        while counts["completed"] < len(submitted_at) and time.monotonic() < deadline and not errors:
            gevent.sleep(RETRY_SECONDS)

    def submit(self, number: int) -> None:
        """Submits one job."""
        body = SETTINGS.job(number)
        submitted_at[body["adapter"]] = time.monotonic()
        key = {"Idempotency-Key": str(uuid.uuid4())}
        adapters_by_job[self.send("submission", "POST", "/v1/jobs", body, **key)[1]["id"]] = body["adapter"]


class Device(ApiUser):
    """Asks for jobs and pretends to train them."""

    fixed_count = len(SETTINGS.devices)

    def on_start(self) -> None:
        """Takes the next credentials."""
        credentials = free_credentials.pop()
        self.token, self.signer = credentials.token, credentials.signer()

    @task
    def train_next_job(self) -> None:
        """Asks for one job and trains it."""
        wait, start = jittered(SETTINGS.wait_seconds), time.monotonic()
        body = {"datasets": [DATASET], "capabilities": CAPABILITIES, "wait_seconds": wait}
        status, lease = self.send("poll", "POST", "/v1/leases", body)
        now = time.monotonic()
        if status == 204:
            seconds["poll without a job"].append(now - start - wait)
            if not wait:
                gevent.sleep(RETRY_SECONDS)
            return
        # A job that was ready before the device asked could not be given to it any sooner.
        seconds["job to a device"].append(now - max(submitted_at[lease["job"]["request"]["adapter"]], start))
        # Not `+= self.train(lease)`, which reads the count before training and loses increments of other devices.
        if random.random() >= SETTINGS.abandon_share and self.train(lease):
            counts["completed"] += 1

    def train(self, lease: dict[str, Any]) -> bool:
        """Speaks the protocol of one lease; returns whether the job was completed by it."""
        path = f"/v1/leases/{lease['id']}"
        for step in range(1, STEPS + 1):
            gevent.sleep(SETTINGS.heartbeat_seconds * random.uniform(0.8, 1.2))
            progress = {"phase": "training", "step": step, "steps": STEPS, "loss": 0.5}
            status, state = self.send("heartbeat", "POST", f"{path}/heartbeat", progress)
            if status != 200 or state["stop"]:
                return False
        size = lease["manifest"]["manifest"]["size"]
        data = dump_adapter(np.full(size, random.random(), np.float32), {"job": lease["job"]["id"]})
        if self.send("upload", "PUT", f"{path}/adapter", data)[0] != 200:
            return False
        completion = {"adapter_sha256": sha256_hex(data), "result": RESULT.model_dump(mode="json")}
        return self.send("completion", "POST", f"{path}/complete", completion)[0] == 200


def read_commands() -> None:
    """Waits for the lines `enough` and `stop` of the parent process."""
    pool = gevent.get_hub().threadpool
    while line := pool.apply(sys.stdin.readline):
        submission_ended.set()
        if line.strip() == "stop":
            break
    load_ended.set()


def main() -> None:
    """Runs the load until it is over and prints the findings."""
    runner = Environment(user_classes=[App, Device]).create_local_runner()
    users = len(SETTINGS.devices) + 1
    # Devices come back over some seconds, like a fleet after a restart of its server.
    runner.start(users, spawn_rate=users / max(SETTINGS.ramp_seconds, 1))
    if SETTINGS.jobs is None:
        gevent.spawn(read_commands)
    print("ready", flush=True)
    load_ended.wait()
    runner.quit()
    print(json.dumps({"seconds": seconds, "errors": errors, "submitted": adapters_by_job, **counts}))


if __name__ == "__main__":
    main()
