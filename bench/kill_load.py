"""The load under which servers are killed: an app that submits jobs and devices that train them, over HTTP.

Whoever gets no answer, or an answer that the server cannot serve now, asks again until it gets one. Training is
pretended: a device takes what its lease gives, tells of progress, uploads a B of the right size and completes.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from typing import Any

import httpx
import numpy as np

from shared.canonical import sha256_hex
from shared.lora import dump_adapter
from shared.request_signature import RequestSigner
from shared.signing import new_private_key, public_text

DATASET = "reviews"
JOBS_PER_RECIPE = 6  # the first of them has a program compiled
STEPS = 3
VANISHES = 0.05  # how often a device leaves its lease to run out
AGAIN_SECONDS = 0.1


class Ended(Exception):
    """The load is over."""


class Caller:
    """One token's requests, each asked until it is answered or the load is over."""

    def __init__(self, url: str, token: str, over: threading.Event) -> None:
        self._client = httpx.Client(
            base_url=url,
            timeout=10,
            verify=False,
            headers={"Authorization": f"Bearer {token}"},  # loopback
        )
        self._over = over
        self.signer: RequestSigner | None = None
        self.unanswered = 0

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """The answer. Raises Ended, or RuntimeError for an answer that no request should get."""
        while not self._over.is_set():
            request = self._client.build_request(
                method,
                path,
                headers=headers,
                **({"content": body} if isinstance(body, bytes) else {} if body is None else {"json": body}),
            )
            if self.signer is not None and method != "GET":
                # Signed anew each time: the same signature twice would be a replay.
                request.headers.update(self.signer.headers(method, request.url.path, "", request.read()))
            try:
                response = self._client.send(request)
            except httpx.TransportError:
                self.unanswered += 1
            else:
                if response.status_code not in (429, 503):
                    if response.status_code >= 500 or response.status_code in (400, 401, 403, 404, 422):
                        raise RuntimeError(f"{method} {path}: {response.status_code} {response.text[:500]}")
                    return response
            self._over.wait(AGAIN_SECONDS)
        raise Ended

    def close(self) -> None:
        """Ends its connections."""
        self._client.close()


class Load:
    """An app and its devices on threads, until `stop`. submitted: adapters by the id of the job that was answered."""

    def __init__(self, url: str, app_token: str, operator_token: str, devices: int, seed: int) -> None:
        self.submitted: dict[str, str] = {}
        self.completed = 0
        self.errors: list[str] = []
        self._url, self._app_token, self._operator_token = url, app_token, operator_token
        self._rng = random.Random(seed)
        self._enough, self._over = threading.Event(), threading.Event()
        self._callers: list[Caller] = []
        works = [self._submit, *(lambda number=number: self._train(number) for number in range(devices))]
        self._threads = [threading.Thread(target=self._run, args=(work,), daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def no_more_jobs(self) -> None:
        """Submits nothing further; devices go on."""
        self._enough.set()
        self._threads[0].join()

    def stop(self) -> int:
        """Ends everything; how many requests were not answered and sent again."""
        self._enough.set()
        self._over.set()
        for thread in self._threads:
            thread.join()
        for caller in self._callers:
            caller.close()
        return sum(caller.unanswered for caller in self._callers)

    def _run(self, work: Any) -> None:
        try:
            work()
        except Ended:
            pass
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def _caller(self, token: str) -> Caller:
        caller = Caller(self._url, token, self._over)
        self._callers.append(caller)
        return caller

    def _submit(self) -> None:
        call = self._caller(self._app_token)
        number = 0
        while not self._enough.is_set():
            adapter = f"adapter-{number}"
            job = {
                "base": "tiny",
                "user": f"user-{number % 5}",
                "adapter": adapter,
                "task": "sst2",
                "dataset": DATASET,
                "recipe": {"rank": 2, "sequence_length": 16, "a_seed": number // JOBS_PER_RECIPE},
                "training": {"steps": STEPS},
                "priority": number % 3,
            }
            response = call("POST", "/v1/jobs", job, **{"Idempotency-Key": str(uuid.uuid4())})
            self.submitted[response.json()["id"]] = adapter
            number += 1
            self._enough.wait(self._rng.uniform(0.0, 0.1))

    def _train(self, number: int) -> None:
        once = self._caller(self._operator_token)("POST", "/v1/enrolments", {}).json()["token"]
        key = new_private_key()
        body = {"name": f"device-{number}", "public_key": public_text(key.public_key()), "platform": "linux"}
        call = self._caller(self._caller(once)("POST", "/v1/devices", body).json()["token"])
        call.signer = RequestSigner(key, time.time)
        rng = random.Random(f"{number}")
        while not self._over.is_set():
            response = call("POST", "/v1/leases", {"datasets": [DATASET]})
            if response.status_code != 200:
                self._over.wait(AGAIN_SECONDS)
            elif rng.random() >= VANISHES and self._train_one(call, response.json(), rng):
                self.completed += 1

    def _train_one(self, call: Caller, lease: dict[str, Any], rng: random.Random) -> bool:
        """Whether the job was completed by this lease."""
        at = f"/v1/leases/{lease['id']}"
        for step in range(1, STEPS + 1):
            told = call("POST", f"{at}/heartbeat", {"phase": "training", "step": step, "steps": STEPS})
            if told.status_code != 200 or told.json()["stop"]:
                return False
            self._over.wait(rng.uniform(0.0, 0.1))
        size = lease["manifest"]["manifest"]["size"]
        data = dump_adapter(np.full(size, rng.random(), np.float32), {"job": lease["job"]["id"]})
        if call("PUT", f"{at}/adapter", data, **{"Content-Type": "application/octet-stream"}).status_code != 200:
            return False
        result = {
            "steps": STEPS,
            "best_step": STEPS,
            "train_seconds": 0.1,
            "seconds": 0.2,
            "peak_rss_bytes": 1,
            "train_examples": 10,
            "truncated_examples": 0,
        }
        done = call("POST", f"{at}/complete", {"adapter_sha256": sha256_hex(data), "result": result})
        return done.status_code == 200
