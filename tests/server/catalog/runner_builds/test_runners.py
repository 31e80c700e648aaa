"""Runner builds over HTTP: signed, replaced, resumed, for devices of any tenant and for nobody else."""

import pytest

from server.catalog.runner_builds.service import RunnerBuildService
from server.identity.signing_keys.service import load_key
from shared.canonical import sha256_hex
from shared.catalog import RunnerBuild, SignedRunnerBuild
from shared.signing import parse_public, verify_runner_build

PLATFORM = "linux-aarch64"
ARCHIVE = bytes(range(256)) * 50


@pytest.fixture
def offer(home):
    """Offers bytes as the runner of a platform; the build."""

    def offer(data=ARCHIVE, platform=PLATFORM, version="0.1.0"):
        home.artifacts.put(data)
        build = RunnerBuild(
            platform=platform, version=version, executorch="1.5.1", size=len(data), sha256=sha256_hex(data)
        )
        with home.database.writing() as session:
            RunnerBuildService(session).offer(build, load_key(home.settings.key_path))
        return build

    return offer


def test_a_device_of_any_tenant_gets_a_signed_build_and_its_bytes(fleet, device, offer):
    build = offer()
    key = parse_public(fleet.actor().get("/v1/server").json()["public_key"])
    for actor in (device, fleet.device("other")):
        answer = actor.get(f"/v1/runner-builds/{PLATFORM}")
        assert verify_runner_build(SignedRunnerBuild.model_validate(answer.json()), key) == build
        response = actor.get(f"/v1/runner-builds/{PLATFORM}/{build.sha256}")
        assert response.content == ARCHIVE
        assert response.headers["etag"] == f'"{build.sha256}"'
        assert actor.head(f"/v1/runner-builds/{PLATFORM}/{build.sha256}").headers["content-length"] == str(len(ARCHIVE))


@pytest.mark.both_databases
def test_a_newer_build_takes_the_place(device, offer, problem):
    old = offer()
    new = offer(b"another", version="0.2.0")
    other = offer(b"for another", platform="linux-x86_64")
    assert device.get(f"/v1/runner-builds/{PLATFORM}").json()["build"] == new.model_dump()
    assert device.get("/v1/runner-builds/linux-x86_64").json()["build"] == other.model_dump()
    problem(device.get(f"/v1/runner-builds/{PLATFORM}/{old.sha256}"), 404, "not-found")
    assert device.get(f"/v1/runner-builds/{PLATFORM}/{new.sha256}").content == b"another"
    problem(device.get(f"/v1/runner-builds/{PLATFORM}/{other.sha256}"), 404, "not-found")


def test_no_other_file_comes_out_here(fleet, app, device, offer, lease, problem):
    """Programs' files stay those of jobs, and runners those of runners."""
    build = offer()
    weights = lease["manifest"]["manifest"]["files"][0]["sha256"]
    problem(device.get(f"/v1/runner-builds/{PLATFORM}/{weights}"), 404, "not-found")
    problem(device.get(f"/v1/files/{build.sha256}"), 404, "not-found")


def test_where_there_is_none_the_way_out_is_named(device, problem):
    refusal = problem(device.get("/v1/runner-builds/android-arm64"), 404, "not-found")
    assert "mobizo-server runner-build add" in refusal["detail"]
    problem(device.get(f"/v1/runner-builds/android-arm64/{'0' * 64}"), 404, "not-found")
    problem(device.get("/v1/runner-builds/linux-x86-64"), 422, "invalid-request")
    problem(device.get("/v1/runner-builds/a-b%0Ac"), 400, "bad-request")
