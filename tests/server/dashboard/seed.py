"""A server with something to look at: jobs in every state, devices, versions, a cohort; all made over the API."""

import contextlib
import math
import shutil
import tempfile
from pathlib import Path

import numpy as np

from server.app import create_app
from server.database.columns import utc_now
from server.identity.quotas import Quota, QuotaService
from server.identity.signing_keys import service as keys
from server.web.state import AppState
from shared.canonical import sha256_hex
from tests.server.actors import Fleet, result, serving
from tests.server.federation.conftest import cohort_request, update_file
from tests.server.homes import copy_home, home_of, make_home

CAPABLE = {
    "total_bytes": 8_000_000_000,
    "backends": ["xnnpack"],
    "engines": ["native", "python"],
    "executorch": "1.5.1",
    "battery": True,
}
LEASED = {"memory_bytes": 5_200_000_000}


@contextlib.contextmanager
def standing_server():
    """A fleet of a server in a directory of its own, outside of pytest."""
    root = Path(tempfile.mkdtemp())
    try:
        make_home(root / "template")
        with home_of(copy_home(root / "template", root / "copy", None), root / "copy" / "source") as home:
            app = create_app(home.settings)
            key = keys.load_key(home.settings.key_path)
            app.state.mobizo = AppState(home.settings, home.database, home.artifacts, key.public_key(), utc_now())
            with serving(app) as url:
                fleet = Fleet(home, url)
                yield fleet
                fleet.close()
    finally:
        shutil.rmtree(root)


def progress(step, steps=150, accuracy=None, best=None, floor=0.28):
    """What a device reports after a step of a run that learns."""
    loss = floor + 0.75 * math.exp(-step / 40) + 0.035 * math.sin(step * 1.7)
    return {
        "phase": "training",
        "step": step,
        "steps": steps,
        "loss": round(loss, 4),
        "lr": round(0.01 * (1 + math.cos(math.pi * step / steps)) / 2, 6),
        "examples_per_second": 11.4,
        "seconds_left": round((steps - step) * 1.9, 1),
        "rss_bytes": 812_000_000 + 40_000 * step,
        "accuracy": accuracy,
        "best_accuracy": best,
    }


def accuracy_at(step, top=0.84):
    return round(top - (top - 0.54) * math.exp(-step / 35), 4)


def report(device, lease, steps, top=0.84, every=3, total=150):
    """Heartbeats of a run up to a step, with a validation every 25 steps."""
    last = None
    for step in range(1, steps + 1, every):
        last = accuracy_at(step // 25 * 25, top) if step >= 25 else None
        body = progress(step, total, last, last, 1.12 - top)
        response = device.post(f"/v1/leases/{lease['id']}/heartbeat", json=body)
        assert response.status_code == 200, response.text
    return last


def run(fleet, app, device, top=0.84, value=0.5, every=3, **changes):
    """A job that a device trains to its end."""
    fleet.ready_job(app, **changes)
    lease = device.lease(capabilities=CAPABLE | {"battery_percent": 76, "charging": True}, **LEASED)
    report(device, lease, 150, top, every)
    return device.finish(
        lease,
        value,
        steps=150,
        best_step=125,
        zero_shot_accuracy=0.542,
        tuned_accuracy=top,
        train_seconds=284.0,
        seconds=331.0,
        peak_rss_bytes=824_000_000,
        train_examples=2400,
        accuracy_split="test",
    )


def populate(fleet, every=3):
    """Fills the server; returns the device that trains now, and its lease. every: steps between two reports."""
    app = fleet.app()
    app.post("/v1/webhooks", json={"url": "https://shop.example/mobizo", "events": ["job.failed", "version.held"]})
    with fleet.home.database.writing() as session:
        QuotaService(session).set_limit("default", Quota.RATINGS, 1000)
    settings = {"training": {"steps": 150, "schedule": "cosine"}}
    learning = settings | {"every": every}
    phone = fleet.device(name="alices-phone")
    jetson = fleet.device(name="jetson-lab", users=("bob", "carol"))
    start = {"start": {"adapter": "alice-movies"}, "recipe": {}}
    bob = {"user": "bob", "adapter": "bob-reviews"}
    run(fleet, app, phone, 0.796, **learning)
    run(fleet, app, phone, 0.842, 0.7, **learning, **start)
    run(fleet, app, phone, 0.761, 0.2, **learning, start={"adapter": "alice-movies", "revision": "v1"}, recipe={})
    run(fleet, app, jetson, 0.823, **bob, **learning)
    run(fleet, app, jetson, 0.855, 0.6, **bob, training={"steps": 150, "lr": 0.003}, every=every)
    failed = fleet.ready_job(app, user="carol", adapter="carol-mail", **settings)
    lease = jetson.lease()
    body = {"code": "task-not-approved", "detail": "the owner of the device has not approved this task for 'movies'"}
    assert jetson.post(f"/v1/leases/{lease['id']}/fail", json=body).status_code in (200, 204)
    assert app.get(f"/v1/jobs/{failed['id']}").json()["state"] == "failed"
    fleet.ready_job(app, user="carol", adapter="carol-notes", **settings)
    lease = jetson.lease()
    body = {"code": "out-of-memory", "detail": "the program needs 2.1 GB, and 1.4 GB were free; close other apps"}
    assert jetson.post(f"/v1/leases/{lease['id']}/fail", json=body).status_code in (200, 204)
    cancelled = app.submit(user="dora", adapter="dora-chat", recipe={"rank": 4})
    assert app.post(f"/v1/jobs/{cancelled['id']}/cancel").status_code == 200
    _cohort(fleet, app, phone, jetson)
    fleet.ready_job(app, user="dora", adapter="dora-mail", repeat={"every": "7d", "min_new_records": 20}, **settings)
    fleet.ready_job(app, **settings, **start)
    lease = phone.lease(capabilities=CAPABLE | {"battery_percent": 64, "charging": True}, **LEASED)
    report(phone, lease, 70, every=every)
    app.submit(user="bob", adapter="bob-mail", recipe={"rank": 8})
    return phone, lease


def _cohort(fleet, app, *devices):
    assert app.post("/v1/cohorts", json=cohort_request(quorum=1)).status_code == 201
    for user, device in zip(("alice", "bob"), devices, strict=True):
        body = {"device": device.device_id}
        assert app.put(f"/v1/cohorts/readers/members/{user}", json=body).status_code == 200
    assert app.post("/v1/cohorts/readers/rounds").status_code == 201
    fleet.home.compile()
    a_sha256 = app.get("/v1/cohorts/readers").json()["a_sha256"]
    lease = devices[0].lease(capabilities=CAPABLE | {"cohorts": True})
    report(devices[0], lease, 3, every=1, total=3)
    data = update_file(np.full(lease["manifest"]["manifest"]["size"], 0.3, np.float32), a_sha256)
    assert devices[0].upload(lease, data).status_code == 200
    body = {"adapter_sha256": sha256_hex(data), "result": result(tuned_accuracy=0.71)}
    assert devices[0].post(f"/v1/leases/{lease['id']}/complete", json=body).status_code == 200
