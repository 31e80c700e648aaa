"""A cohort of a tenant, its members' devices, and a worker in this process."""

import json
from functools import cache

import numpy as np
import pytest
from dp_accounting import SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from server.database.columns import utc_now
from server.federation.models import CohortRound
from server.worker import create_worker
from shared.canonical import canonical_json, sha256_hex
from shared.zo.lora import dump_adapter
from tests.server.actors import JOB, result
from tests.server.homes import drain, sweep

URL = "/v1/cohorts/readers"
COHORT = {
    "name": "readers",
    "base": "tiny",
    "task": "sst2",
    "dataset": "movies",
    "recipe": JOB["recipe"],
    "training": {"steps": 3},
    "quorum": 2,
}
# What a private job may not tell.
NO_FIGURES = {"train_examples": None, "truncated_examples": None, "zero_shot_accuracy": None, "tuned_accuracy": None}


def cohort_request(**changes):
    """A valid body of POST /v1/cohorts."""
    return json.loads(json.dumps(COHORT)) | changes


@cache
def epsilon_of(event, times):
    """What an event costs so many times at a delta of 1e-5, by the accountant itself on its own finer grid."""
    accountant = PLDAccountant()
    accountant.compose(SelfComposedDpEvent(event, times))
    return accountant.get_epsilon(1e-5)


def update_file(flat, a_sha256):
    """The adapter file of flat B as a device writes it: it names its frozen A."""
    return dump_adapter(np.asarray(flat, np.float32), {"mobizo": canonical_json({"a_sha256": a_sha256}).decode()})


class Band:
    """One cohort: who is in it, and what their devices do."""

    def __init__(self, home, fleet, app):
        self.home, self.fleet, self.app = home, fleet, app
        self.devices, self.worker = {}, None
        self.view = None

    def create(self, *users, **changes):
        """A cohort of these users; its view before they joined."""
        answer = self.app.post("/v1/cohorts", json=cohort_request(**changes))
        assert answer.status_code == 201, answer.text
        self.view = answer.json()
        self.join(*users)
        return self.view

    def join(self, *users):
        for user in users:
            device = self.devices[user] = self.fleet.device(name=f"{user}-phone", users=[user])
            answer = self.app.put(f"{URL}/members/{user}", json={"device": device.device_id})
            assert answer.status_code == 200, answer.text

    def begin(self, *users, **changes):
        """A cohort of these users, its first round open; the round."""
        self.create(*users, **changes)
        return self.open()

    def open(self):
        answer = self.app.post(f"{URL}/rounds")
        assert answer.status_code == 201, answer.text
        self.home.compile()
        return answer.json()

    def round(self, number=1):
        return self.app.get(f"{URL}/rounds/{number}").json()

    def parts(self, number=1):
        items = self.app.get(f"{URL}/rounds/{number}/updates").json()["items"]
        return {part["user"]: part for part in items}

    def lease(self, user):
        return self.devices[user].lease("movies", capabilities={"cohorts": True})

    def upload(self, user, lease, value, a_sha256=None):
        """Sends B with every element `value`; the answer."""
        size = lease["manifest"]["manifest"]["size"]
        flat = np.full(size, value, np.float32) if np.isscalar(value) else value
        self.update = update_file(flat, a_sha256 or self.view["a_sha256"])
        return self.devices[user].upload(lease, self.update)

    def complete(self, user, lease, **changes):
        body = {"adapter_sha256": sha256_hex(self.update), "result": result(**changes)}
        return self.devices[user].post(f"/v1/leases/{lease['id']}/complete", json=body)

    def finish(self, user, lease, value, **changes):
        """Uploads and completes; what the device is told in the end."""
        for answer in (self.upload(user, lease, value), self.complete(user, lease, **changes)):
            assert answer.status_code == 200, answer.text
        return answer.json()

    def train(self, user, value, **changes):
        """One member's whole part: what the device is told in the end."""
        lease = self.lease(user)
        assert lease is not None
        return self.finish(user, lease, value, **changes)

    def train_all(self, result_changes=None, **values):
        """The whole part of each of these users, then a worker's part. result_changes: changes of their results."""
        for user, value in values.items():
            self.train(user, value, **(result_changes or {}))
        self.work()

    def past_deadline(self):
        self.home.change(CohortRound, deadline=utc_now())

    def work(self):
        """A worker works until nothing waits."""
        drain(self.worker)

    def sweep(self):
        """A worker runs its sweeps."""
        sweep(self.worker)

    def b(self, revision="main"):
        """Flat B of a version of the cohort's adapter."""
        answer = self.app.get(f"/v1/adapters/readers/revisions/{revision}")
        assert answer.status_code == 200, answer.text
        data = self.home.artifacts.read(answer.json()["sha256"])
        return np.frombuffer(data[8 + int.from_bytes(data[:8], "little") :], "<f4")


@pytest.fixture
def band(home, fleet, app):
    new_band = Band(home, fleet, app)
    new_band.worker = create_worker(home.settings, home.database)
    new_band.worker.register()
    return new_band
