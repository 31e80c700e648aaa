"""Which adapters a device may have: of its own tenant, published, and of a user who is bound to it."""

import pytest

from shared.protocol import DeviceAdapter
from shared.signing import parse_public, verify_adapter, verify_manifest
from tests.server.actors import adapter_bytes

NAME = "alice-movies"


@pytest.fixture
def tablet(fleet):
    return fleet.device(name="tablet", users=("bob",))


def own(device, revision="main", name=NAME, file=""):
    return device.get(f"/v1/devices/self/adapters/{name}/{revision}{file}")


def bind(operator, device, user="alice"):
    assert operator.put(f"/v1/devices/{device.device_id}/users/{user}").status_code == 200


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
def test_another_device_has_it_while_its_user_is_bound(operator, tablet, version, problem):
    refusal = problem(own(tablet), 404, "adapter-not-found")
    missing = problem(own(tablet, name="nobody"), 404, "adapter-not-found")
    assert refusal["detail"].replace(NAME, "nobody") == missing["detail"]
    problem(own(tablet, file="/lora_B.safetensors"), 404, "adapter-not-found")
    bind(operator, tablet)
    assert own(tablet).json()["adapter"]["manifest"]["version"] == 1
    assert own(tablet, file="/lora_B.safetensors").status_code == 200
    assert operator.delete(f"/v1/devices/{tablet.device_id}/users/alice").status_code == 204
    problem(own(tablet), 404, "adapter-not-found")


def test_the_programs_files_come_with_it(app, operator, tablet, version, problem):
    program = app.get(f"/v1/programs/{version['recipe_id']}").json()["manifest"]
    url = f"/v1/files/{program['files'][0]['sha256']}"
    problem(tablet.get(url), 404, "not-found")
    bind(operator, tablet)
    assert tablet.get(url).status_code == 200
    assert operator.delete(f"/v1/devices/{tablet.device_id}/users/alice").status_code == 204
    problem(tablet.get(url), 404, "not-found")


def test_a_held_version_is_nobodys(fleet, app, device, version, problem):
    fleet.ready_job(app)
    assert device.finish(device.lease(), 0.25, tuned_accuracy=0.1)["state"] == "held"
    for file in ("", "/lora_B.safetensors"):
        problem(own(device, "v2", file=file), 409, "version-held")
    assert own(device).json()["adapter"]["manifest"]["version"] == 1


def test_a_deleted_adapter_is_there_for_no_device(app, device, version, problem):
    problem(own(device, "v9"), 404, "revision-not-found")
    assert app.delete(f"/v1/adapters/{NAME}").status_code == 200
    problem(own(device), 404, "adapter-not-found")
