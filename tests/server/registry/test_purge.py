"""The end of what was deleted: rows after the grace, then bytes that nothing else names."""

from datetime import timedelta

import pytest

from server.database.columns import utc_now
from server.registry.models import Adapter, StoredVersion
from server.registry.purge import purge_adapters
from tests.server.registry.conftest import URL

GRACE = timedelta(days=30)


@pytest.fixture
def purge(home):
    """One look of a worker, `days` after everything was deleted; how many versions went."""

    def look(days):
        for table in (Adapter, StoredVersion):
            home.change(table, table.deleted_at.is_not(None), deleted_at=utc_now() - timedelta(days=days))
        return purge_adapters(home.database, GRACE)

    return look


def files_of(app, version, url=URL):
    return {file["sha256"] for file in app.get(f"{url}/versions/{version}/peft").json()["files"]}


@pytest.mark.both_databases
def test_a_version_goes_after_its_grace_and_its_bytes_with_it(home, app, device, publish, decide, purge, problem):
    first, second = publish(0.25), publish(0.5)
    shared = publish(0.5, job={"adapter": "alice-books"})  # the same bytes, in another adapter
    assert shared["sha256"] == second["sha256"]
    mine, others = files_of(app, 1), files_of(app, 1, "/v1/adapters/alice-books")
    assert mine & others  # adapter_config.json tells of the recipe alone
    decide("DELETE", "/versions/1")
    decide("DELETE", "/versions/2")
    assert purge(29) == 0
    assert home.collect() == set()
    assert decide("POST", "/versions/2/undelete")["version"] == 2
    assert purge(31) == 1
    problem(app.post(f"{URL}/versions/1/undelete"), 404, "revision-not-found")
    decide("DELETE", "/versions/2")
    assert purge(31) == 1
    books = "/v1/adapters/alice-books/versions/1/lora_B.safetensors"
    removed_files = home.collect()
    assert first["sha256"] in removed_files
    assert shared["sha256"] not in removed_files
    assert mine - removed_files == mine & others
    assert app.get(books).status_code == 200
    assert publish(0.75)["version"] == 3  # numbers are never given again
    assert [event["action"] for event in decide("GET", "/events")["items"]][:2] == ["published", "removed"]


def test_an_adapter_goes_whole_and_its_trail_stays(home, app, publish, decide, purge, problem):
    versions = [publish(value) for value in (0.25, 0.5)]
    files_of(app, 2)
    decide("DELETE", "/versions/1")
    decide("DELETE", "?reason=gone")
    assert purge(31) == 2
    problem(app.post(f"{URL}/undelete"), 404, "adapter-not-found")
    assert {version["sha256"] for version in versions} < home.collect()
    assert decide("GET", "/events")["items"][0]["action"] == "removed"
    again = publish(0.25)
    assert (again["version"], again["sha256"]) == (1, versions[0]["sha256"])
    assert again["revision"] != versions[0]["revision"]


def test_a_completion_that_is_said_again_after_the_removal(home, device, lease, decide, purge, problem):
    version = device.finish(lease)
    decide("DELETE", "/versions/1")
    purge(31)
    body = {"adapter_sha256": version["sha256"], "result": version["result"]}
    problem(device.post(f"/v1/leases/{lease['id']}/complete", json=body), 410, "lease-ended")
