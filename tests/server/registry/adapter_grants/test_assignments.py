"""Which adapters a device may have: of its own tenant, published, and assigned to it or trained by it."""

import pytest

from server.identity.devices.service import DeviceService
from shared.protocol import DeviceAdapter
from shared.signing import parse_public, verify_adapter, verify_manifest
from tests.server.conftest import adapter_bytes

NAME = "alice-movies"


@pytest.fixture
def version(device, lease):
    """Version 1, which `device` trained."""
    return device.finish(lease)


@pytest.fixture
def tablet(fleet):
    return fleet.device(name="tablet")


def own(device, revision="main", name=NAME, file=""):
    return device.get(f"/v1/devices/self/adapters/{name}/{revision}{file}")


def place(device):
    return f"/v1/adapters/{NAME}/devices/{device.device_id}"


def test_a_device_has_what_it_trained(device, version):
    granted = DeviceAdapter.model_validate(own(device).json())
    key = parse_public(device.get("/v1/server").json()["public_key"])
    manifest, program = verify_adapter(granted.adapter, key), verify_manifest(granted.program, key)
    assert (manifest.version, manifest.revision) == (1, version["revision"])
    assert (manifest.a_sha256, manifest.recipe_id) == (program.a_sha256, program.recipe_id)
    response = own(device, manifest.revision, file="/lora_B.safetensors")
    assert response.content == adapter_bytes(manifest.size_d)
    assert response.headers["etag"] == f'"{manifest.sha256}"'
    url = str(response.url.path)
    assert device.get(url, headers={"Range": "bytes=8-15"}).content == response.content[8:16]
    assert device.head(url).headers["content-length"] == str(manifest.size)


@pytest.mark.both_databases
def test_another_device_has_it_once_it_is_assigned(app, tablet, version, problem):
    refusal = problem(own(tablet), 404, "adapter-not-found")
    missing = problem(own(tablet, name="nobody"), 404, "adapter-not-found")
    assert refusal["detail"].replace(NAME, "nobody") == missing["detail"]
    problem(own(tablet, file="/lora_B.safetensors"), 404, "adapter-not-found")
    first = app.put(place(tablet))
    assert first.status_code == 200
    assert app.put(place(tablet)).json() == first.json()
    assert own(tablet).json()["adapter"]["manifest"]["version"] == 1
    assert own(tablet, file="/lora_B.safetensors").status_code == 200
    assert app.get(f"/v1/adapters/{NAME}/devices").json()["items"] == [first.json()]
    for _ in range(2):
        assert app.delete(place(tablet)).status_code == 204
    problem(own(tablet), 404, "adapter-not-found")


def test_the_programs_files_come_with_it(app, tablet, version, problem):
    program = app.get(f"/v1/programs/{version['recipe_id']}").json()["manifest"]
    url = f"/v1/files/{program['files'][0]['sha256']}"
    problem(tablet.get(url), 404, "not-found")
    app.put(place(tablet))
    assert tablet.get(url).status_code == 200
    app.delete(place(tablet))
    problem(tablet.get(url), 404, "not-found")


def test_a_held_version_is_nobodys(fleet, app, device, version, problem):
    fleet.ready_job(app)
    assert device.finish(device.lease(), 0.25, tuned_accuracy=0.1)["state"] == "held"
    for file in ("", "/lora_B.safetensors"):
        problem(own(device, "v2", file=file), 409, "version-held")
    assert own(device).json()["adapter"]["manifest"]["version"] == 1


def test_no_tenant_reaches_into_another(fleet, app, device, version, problem):
    stranger, foreign = fleet.app("other"), fleet.device("other")
    problem(stranger.put(place(foreign)), 404, "adapter-not-found")
    problem(app.put(place(foreign)), 404, "not-found")
    problem(own(foreign), 404, "adapter-not-found")


def test_a_revoked_device_is_assigned_nothing(fleet, app, tablet, version, problem):
    with fleet.home.database.writing() as session:
        DeviceService(session).revoke("default", tablet.device_id)
    problem(app.put(place(tablet)), 404, "not-found")


def test_a_deleted_adapter_is_there_for_no_device(app, device, version, problem):
    problem(own(device, "v9"), 404, "revision-not-found")
    assert app.delete(f"/v1/adapters/{NAME}").status_code == 200
    problem(own(device), 404, "adapter-not-found")
