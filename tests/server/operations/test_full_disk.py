"""A disk that fills while a device uploads to a real server process: refused clearly, nothing half-stored, no harm."""

import resource

import psutil
import pytest
from sqlalchemy import select

from server.catalog.bases import BaseModelEntry
from server.jobs.leases.repository import JobLease
from shared.canonical import sha256_hex
from tests.server.actors import Fleet, adapter_bytes
from tests.server.homes import SHAPE
from tests.server.operations.test_serving import running

MEBIBYTE = 1 << 20
WIDE = SHAPE.model_copy(update={"heads": 64, "kv_heads": 64, "head_dim": 512})  # D of over a million


@pytest.fixture
def wide(home):
    """The home's base model, of adapters that are larger than its database."""
    (home.source / "shape.json").write_text(WIDE.model_dump_json())
    home.change(BaseModelEntry, shape=WIDE)
    return home


@pytest.mark.parametrize(
    ("room", "codes"),
    [(5 * MEBIBYTE, {"storage-full"}), (1024, {"storage-full", "unavailable"})],
    ids=["the files' disk", "the database's, too"],
)
def test_an_upload_that_fills_the_disk(wide, room, codes):
    home = wide
    staging = home.settings.artifacts_path / "staging"
    with running(home, "--workers", "0") as (process, url):
        fleet = Fleet(home, url)
        app = fleet.app()
        fleet.ready_job(app, recipe={"rank": 16})
        device = fleet.device()
        lease = device.lease()
        data = adapter_bytes(lease["manifest"]["manifest"]["size"])
        assert len(data) > 6 * MEBIBYTE
        before, server = home.stored_files(), psutil.Process(process.pid)
        limits = server.rlimit(resource.RLIMIT_FSIZE)
        server.rlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        response = device.upload(lease, data)
        server.rlimit(resource.RLIMIT_FSIZE, limits)
        assert response.status_code == 503
        assert response.json()["code"] in codes
        assert response.headers["retry-after"]
        assert home.stored_files() == before
        assert list(staging.iterdir()) == []
        assert home.scalar(select(JobLease.upload_sha256)) is None
        again = device.upload(lease, data)
        assert again.status_code == 200
        assert home.artifacts.read(again.json()["sha256"]) == data
        assert again.json()["sha256"] == sha256_hex(data)
        fleet.close()
