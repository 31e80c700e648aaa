"""What the largest uploads cost the server for each MiB: CPU time of the process and of its event loop, and memory."""

import struct
import sys
import threading
import zlib

import numpy as np
import pytest

from server.app import create_api, create_app
from server.federation.secure_aggregation.service import SecureAggregationService
from server.settings import MEBIBYTE
from server.web.routes import BodyKind, Route
from shared.zo.lora import BaseShape, adapter_file
from shared.zo.trajectory import MAGIC, TrajectoryHeader
from tests.docs.server_pages import COSTS, UPLOADS
from tests.server.actors import Fleet, serving
from tests.server.web.test_hostile_requests import Meter

DATABASES = ("sqlite",)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PREFIX = "/v1/leases/{lease_id}/"
LEAST = 4  # MiB of an adapter, a masked vector


@pytest.fixture
def besieged(home):
    """A server, and a device with the lease of a job whose files are large: (meter, device, lease)."""
    shape = BaseShape.model_validate_json((home.source / "shape.json").read_text())
    changes = {"layers": 8, "head_dim": 1024}
    (home.source / "shape.json").write_text(shape.model_copy(update=changes).model_dump_json())
    before = set(threading.enumerate())
    with serving(create_app(home.settings)) as url:
        (loop,) = set(threading.enumerate()) - before
        fleet = Fleet(home, url)
        app, device = fleet.app(), fleet.device()
        fleet.ready_job(app, recipe={"rank": 256, "queries": 1}, training={"steps": 1_000_000})
        yield Meter(loop), device, device.lease()
        fleet.close()


def measured(besieged, name, body, answers):
    """Uploads a body and compares its cost with the bound of its route."""
    meter, device, lease = besieged
    address = f"/v1/leases/{lease['id']}/{name}"
    device.put(address, content=b"x")  # what the first request of a process loads
    cost, response = meter.cost(lambda: device.put(address, content=body))
    assert response.status_code in answers, response.text[:300]
    size, least, each = len(body) / MEBIBYTE, COSTS[BodyKind.NONE], UPLOADS[PREFIX + name].per_mebibyte
    costs = {field: (value, value / size) for field, value in vars(cost).items()}
    sys.stderr.write(f"{name}, {size:.1f} MiB, {response.status_code}: {costs}\n")
    over = [field for field, value in vars(cost).items() if value > getattr(least, field) + size * getattr(each, field)]
    assert over == [], costs


def test_every_upload_has_bounds():
    routes = [route for route in create_api().routes if isinstance(route, Route)]
    assert {route.path for route in routes if route.body_kind is BodyKind.FILE} == UPLOADS.keys()


@pytest.mark.parametrize("last", [0.5, np.nan])
def test_an_adapter(besieged, last):
    manifest = besieged[2]["manifest"]["manifest"]
    flat = np.full(manifest["size"], 0.5, np.float32)
    body = adapter_file(flat, job_id="x", recipe_id=manifest["recipe_id"], a_sha256=manifest["a_sha256"], step=1)
    body = body[:-4] + np.array([last], "<f4").tobytes()
    assert len(body) > LEAST * MEBIBYTE
    measured(besieged, "adapter", body, {200, 422})


def frame(kind, step, payload):
    data = struct.pack("<cII", kind, step, len(payload)) + payload
    return data + struct.pack("<I", zlib.crc32(data))


@pytest.mark.parametrize("kind", ["steps", "limits", "evaluations"])
def test_a_trajectory(besieged, kind):
    """A million steps are 16 MiB; a quarter of them is enough to measure."""
    lease = besieged[2]
    manifest, job = lease["manifest"]["manifest"], lease["job"]
    header = TrajectoryHeader(
        job_id=job["id"],
        job_seed=job["request"]["training"]["seed"],
        recipe_id=manifest["recipe_id"],
        noise=manifest["recipe"]["noise"],
        queries=1,
        size=manifest["size"],
    )
    frames = {
        "steps": (frame(b"S", step, struct.pack("<f", 1)) for step in range(250_000)),
        "limits": (frame(b"L", 0, b'{"step":0}') for _ in range(250_000)),
        "evaluations": (
            frame(b"E", 0, b'{"step":0,"split":"test","correct":0,"total":1,"loss":0}') for _ in range(100_000)
        ),
    }
    body = MAGIC + frame(b"H", 0, header.model_dump_json().encode()) + b"".join(frames[kind])
    measured(besieged, "trajectory", body, {200} if kind == "steps" else {422})


def test_a_masked_vector(besieged, monkeypatch):
    """It is read and hashed before the round is asked, which this job does not have."""
    body = bytes(16 * MEBIBYTE)
    monkeypatch.setattr(SecureAggregationService, "size", lambda *_: len(body))
    measured(besieged, "masking/vector", body, {404, 409, 410, 422})
