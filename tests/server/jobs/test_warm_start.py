"""Jobs that go on from an adapter version: pinned when submitted, refused in words, handed to one device alone."""

import pytest

from server.catalog.bases import BaseRepository
from server.database.columns import utc_now
from server.registry.models import StoredVersion
from shared.access import Role, Scope
from shared.canonical import sha256_hex
from shared.registry import SignedAdapter
from shared.signing import parse_public, verify_adapter
from tests.server.actors import adapter_bytes, job_request
from tests.server.homes import base_entry

NAME = "alice-movies"
FROM = {"start": {"adapter": NAME}}


@pytest.fixture
def first(device, lease):
    """Version 1 of the adapter, approved, whose B is 0.5 throughout."""
    return device.finish(lease)


@pytest.fixture
def start_lease(fleet, app, device, first):
    """A lease of `device` on a job that goes on from version 1."""
    fleet.ready_job(app, **FROM)
    return device.lease()


def refusal(app, problem, status, code, **body):
    return problem(app.post("/v1/jobs", json=job_request(**body)), status, code)


def delete(fleet, version):
    """As the registry does, before its grace period is over."""
    fleet.home.change(StoredVersion, StoredVersion.version == version, deleted_at=utc_now())


def test_main_is_pinned_when_the_job_is_submitted(fleet, app, device, first):
    job = fleet.ready_job(app, **FROM)
    assert job["request"]["start"] == {"adapter": NAME, "revision": first["revision"]}
    fleet.ready_job(app)  # from nothing, so that `main` moves on
    other = device.lease()
    assert (other["job"]["id"], other["start"]["manifest"]["version"]) == (job["id"], 1)
    device.finish(other, 0.25, tuned_accuracy=0.8)
    second = device.finish(device.lease(), 0.75, tuned_accuracy=0.9)
    assert app.get(f"/v1/jobs/{job['id']}").json()["request"]["start"]["revision"] == first["revision"]
    latest = app.submit(**FROM)["request"]["start"]["revision"]
    assert latest == second["revision"] != first["revision"]


def test_the_lease_tells_the_file_and_the_device_gets_it(fleet, device, first, start_lease):
    signed = SignedAdapter.model_validate(start_lease["start"])
    key = device.get("/v1/server").json()["public_key"]
    manifest = verify_adapter(signed, parse_public(key))
    assert (manifest.sha256, manifest.size, manifest.version) == (first["sha256"], first["size"], 1)
    url = f"/v1/leases/{start_lease['id']}/start"
    response = device.get(url)
    assert response.content == adapter_bytes(manifest.size_d)
    assert sha256_hex(response.content) == manifest.sha256
    assert response.headers["etag"] == f'"{manifest.sha256}"'
    part = device.get(url, headers={"Range": "bytes=8-15"})
    assert (part.status_code, part.content) == (206, response.content[8:16])
    assert device.head(url).headers["content-length"] == str(manifest.size)


def test_a_recipe_that_is_left_out_is_the_starts(fleet, app, device):
    fleet.ready_job(app, recipe={"rank": 4, "a_seed": 9, "queries": 2})
    first = device.finish(device.lease())
    body = job_request(**FROM)
    del body["recipe"]
    job = app.post("/v1/jobs", json=body).json()
    assert job["recipe"] == first["recipe"]
    assert job["state"] == "ready"  # nothing is left to compile


def test_what_shapes_no_b_may_differ(app, first):
    recipe = {"queries": 2, "effective_batch": 1, "sequence_length": 12, "precision": "int8-weight"}
    assert app.submit(**FROM, recipe=recipe)["recipe"]["precision"] == "int8-weight"


@pytest.mark.parametrize(
    ("recipe", "field", "start", "job"),
    [
        ({"rank": 4}, "recipe.rank", 2, 4),
        ({"targets": ["q_proj"]}, "recipe.targets", ["q_proj", "v_proj"], ["q_proj"]),
        ({"layers": "last:1"}, "recipe.layers", "all", "last:1"),
        ({"a_seed": 1}, "recipe.a_seed", 0, 1),
        ({"alpha": 16}, "recipe.alpha", 32, 16),
    ],
)
def test_a_program_of_another_layout_or_a_is_refused(app, first, problem, recipe, field, start, job):
    document = refusal(app, problem, 422, "start-mismatch", **FROM, recipe=recipe)
    assert (document["field"], document["start"], document["job"]) == (field, start, job)


def test_another_base_is_refused(fleet, app, first, problem):
    with fleet.home.database.writing() as session:
        bases = BaseRepository(session)
        bases.add(base_entry("other", bases.by_name("tiny").tokenizer_sha256, sha256="c" * 64))
    document = refusal(app, problem, 422, "start-mismatch", **FROM, base="other")
    assert (document["field"], document["start"], document["job"]) == ("base", "b" * 64, "c" * 64)


def test_a_program_that_was_compiled_with_another_a_is_refused(fleet, app, first, problem):
    fleet.home.change(StoredVersion, a_sha256="0" * 64)
    assert refusal(app, problem, 422, "start-mismatch", **FROM)["field"] == "a_sha256"


def test_what_is_not_there_is_told_exactly(fleet, app, first, problem):
    start = {"adapter": "nobody"}
    assert "nobody" in refusal(app, problem, 404, "adapter-not-found", start=start)["detail"]
    refusal(app, problem, 404, "revision-not-found", start={"adapter": NAME, "revision": "v9"})
    stranger = fleet.app("other")
    problem_document = refusal(stranger, problem, 404, "adapter-not-found", start={"adapter": NAME})
    assert problem_document["detail"] == refusal(app, problem, 404, "adapter-not-found", start=start)["detail"].replace(
        "nobody", NAME
    )
    for revision in ("..", "", "a/b", "x" * 97):
        refusal(app, problem, 422, "invalid-request", start={"adapter": NAME, "revision": revision})


def test_a_version_that_is_held_or_deleted_is_refused(fleet, app, device, first, problem):
    fleet.ready_job(app)
    held_version = device.finish(device.lease(), 0.25, tuned_accuracy=0.1)
    assert held_version["state"] == "held"
    refusal(app, problem, 409, "version-held", start={"adapter": NAME, "revision": "v2"})
    delete(fleet, 1)
    refusal(app, problem, 404, "revision-not-found", start={"adapter": NAME, "revision": "v1"})


def test_a_token_that_may_not_read_adapters_may_not_start_from_one(fleet, first, problem):
    text = fleet.home.token(Role.APP, scopes=[Scope.JOBS_READ, Scope.JOBS_WRITE])
    document = refusal(fleet.actor(text), problem, 403, "forbidden", **FROM)
    assert document["missing"] == ["adapters:read"]


def test_only_the_device_that_holds_the_lease_gets_the_file(fleet, device, start_lease, problem):
    url = f"/v1/leases/{start_lease['id']}/start"
    for other in (fleet.device(name="tablet"), fleet.device("other")):
        problem(other.get(url), 404, "not-found")
    assert device.post(f"/v1/leases/{start_lease['id']}/release").status_code == 200
    problem(device.get(url), 410, "lease-ended")


def test_a_job_that_begins_from_nothing_has_no_start(device, lease, problem):
    assert lease["start"] is None
    problem(device.get(f"/v1/leases/{lease['id']}/start"), 404, "not-found")


def test_a_start_deleted_before_a_device_came_ends_the_job(fleet, app, device, first):
    job = fleet.ready_job(app, **FROM)
    delete(fleet, 1)
    assert device.lease() is None
    error = app.get(f"/v1/jobs/{job['id']}").json()["error"]
    assert error["code"] == "start-deleted"
    assert "version 1 of 'alice-movies'" in error["detail"]


def test_a_start_deleted_after_that_is_handed_out_no_more(fleet, device, start_lease, problem):
    delete(fleet, 1)
    problem(device.get(f"/v1/leases/{start_lease['id']}/start"), 409, "start-deleted")
    assert device.lease()["start"] is None
    # What was trained already is taken: it is the adapter's next version, and names where it came from.
    assert device.finish(start_lease, 0.25, tuned_accuracy=0.8)["parent"]["version"] == 1


ADAPTERS = ("alice-movies", "alice-products", "alice-posts", "alice-letters", "alice-notes")


@pytest.fixture
def trainer(fleet, app):
    """A device that has trained five adapters for alice, and one more for her and for bob that no job of hers fits."""
    device = fleet.device(name="tablet", users=("alice", "bob"))
    wide, of_bob = {"adapter": "alice-wide", "recipe": {"rank": 4}}, {"adapter": "bobs", "user": "bob"}
    for changes in (*({"adapter": name} for name in ADAPTERS), wide, of_bob):
        fleet.ready_job(app, **changes)
        device.finish(device.lease())
    return device


def named(lease):
    return [(start["manifest"]["adapter"], start["manifest"]["version"]) for start in lease["starts"]]


def test_the_device_chooses_among_its_users_versions_that_fit(fleet, app, trainer, problem):
    job = fleet.ready_job(app, start="auto")
    assert job["request"]["start"] == "auto"
    lease = trainer.lease()
    assert lease["start"] is None
    newest = [("alice-notes", 1), ("alice-letters", 1), ("alice-posts", 1)]
    assert named(lease) == [("alice-movies", 1), *newest]  # its own first, and no more than four
    manifest = lease["starts"][1]["manifest"]
    revision = app.get("/v1/adapters/alice-notes/versions/1").json()["revision"]
    chosen = {"adapter": "alice-notes", "revision": revision}
    download = trainer.get(f"/v1/devices/self/adapters/alice-notes/{revision}/lora_B.safetensors")
    assert sha256_hex(download.content) == manifest["sha256"]
    url = f"/v1/leases/{lease['id']}/start"
    of_bob = {"adapter": "bobs", "revision": app.get("/v1/adapters/bobs/versions/1").json()["revision"]}
    problem(trainer.post(url, json={"start": of_bob}), 404, "not-found")
    for _ in range(2):
        assert trainer.post(url, json={"start": chosen}).status_code == 200
    problem(trainer.post(url, json={"start": None}), 409, "conflict")
    again = trainer.lease()
    assert again["job"]["request"]["start"] == chosen
    assert again["start"]["manifest"] == manifest
    assert "starts" not in again
    assert trainer.get(url).content == download.content
    version = trainer.finish(again, 0.25, tuned_accuracy=0.8)
    assert (version["parent"]["adapter"], version["parent"]["version"]) == ("alice-notes", 1)
    events = app.get(f"/v1/jobs/{job['id']}/events").text
    assert events.index('"start":"auto"') < events.index(revision)


def test_a_device_may_prefer_the_base_and_a_deleted_candidate_is_none(fleet, app, trainer, problem):
    job = fleet.ready_job(app, start="auto")
    lease = trainer.lease()
    url = f"/v1/leases/{lease['id']}/start"
    chosen = {"adapter": NAME, "revision": app.get(f"/v1/adapters/{NAME}/versions/1").json()["revision"]}
    assert fleet.operator().delete(f"/v1/adapters/{NAME}").status_code == 200
    problem(trainer.post(url, json={"start": chosen}), 404, "not-found")
    assert NAME not in dict(named(trainer.lease()))
    assert trainer.post(url, json={"start": None}).status_code == 200
    assert app.get(f"/v1/jobs/{job['id']}").json()["request"]["start"] is None


def test_a_private_job_cannot_choose(app, problem):
    privacy = {"clip": 0.5, "noise_multiplier": 1.0, "sampling_rate": 0.2}
    document = refusal(app, problem, 422, "invalid-request", start="auto", privacy=privacy)
    assert "a private job measures nothing on its data, so it cannot choose a start" in document["detail"]
