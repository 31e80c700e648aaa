"""Calibrations over HTTP: registered, listed for every tenant, named by jobs and cohorts, in what is made of them."""

import gguf
import numpy as np
import pytest
import safetensors.numpy

from server.catalog.bases import BaseRepository
from server.catalog.calibrations import service
from server.catalog.calibrations.service import CalibrationRepository, CalibrationService, register_file
from server.inference.models import ServedModels
from server.inference.texts import ServedAdapterRef
from server.operations.backup import named_files
from server.storage.store import referenced
from server.worker import create_worker
from shared.canonical import sha256_hex
from shared.errors import BadRequest, Conflict, InvalidUpload, NotFound, UnknownBase
from shared.recipe import TARGETS, BaseRef, Recipe
from shared.zo.calibration import CalibrationMetadata, dump_calibration, load_calibration
from shared.zo.lora import a_fingerprint, lora_modules
from tests.server.actors import JOB
from tests.server.federation.conftest import cohort_request
from tests.server.homes import SHAPE, base_entry, drain

LIST = "/v1/calibrations"
OTHER = "c" * 64  # sha256 of another base


def file_for(base="b" * 64, width=3, seed=0):
    """A calibration of every linear layer of a base of SHAPE."""
    recipe = Recipe(base=BaseRef(name="tiny", sha256=base), targets=TARGETS, answer_length=1, choices=2)
    random, directions = np.random.default_rng(seed), {}
    for module in lora_modules(recipe, SHAPE):
        columns = np.linalg.qr(random.normal(size=(module.in_features, width)))[0]
        directions[module.name] = columns.astype(np.float32)
    metadata = CalibrationMetadata(base=recipe.base, kind="gradients", task="sst2", examples=200)
    return dump_calibration(metadata, directions)


@pytest.fixture
def register(home):
    def register(data):
        return register_file(home.database, home.artifacts, data).sha256

    return register


@pytest.fixture
def remove(home):
    def remove(beginning):
        with home.database.writing() as session:
            return CalibrationService(session, home.artifacts).remove(beginning).sha256

    return remove


@pytest.fixture
def calibration(register):
    register(file_for())
    return load_calibration(file_for())


def named_by(calibration):
    return JOB["recipe"] | {"calibration": calibration.sha256}


def a_of(calibration, module, rank=2):
    return calibration.directions[module.name][:, :rank] / np.float32(np.sqrt(3))


def test_it_is_listed_for_every_tenant(app, fleet, calibration, register):
    item = app.get(LIST).json()["items"][0]
    size = len(file_for())
    assert item.pop("created_at")
    assert item == {
        "sha256": sha256_hex(file_for()),
        "base": "tiny",
        "kind": "gradients",
        "task": "sst2",
        "examples": 200,
        "modules": 14,
        "width": 3,
        "size": size,
    }
    assert register(file_for()) == calibration.sha256  # the same again changes nothing
    newer = register(file_for(seed=1))
    items = fleet.app("other").get(LIST).json()["items"]
    assert [each["sha256"] for each in items] == [newer, calibration.sha256]


def test_from_a_job_to_its_exports(home, fleet, app, device, calibration, tmp_path):
    app.submit(recipe=named_by(calibration))
    worker = create_worker(home.settings, home.database)
    worker.register()
    drain(worker)
    assert fleet.app("other").submit(recipe=named_by(calibration))["state"] == "ready"
    lease = device.lease()
    manifest = lease["manifest"]["manifest"]
    recipe = Recipe.model_validate(manifest["recipe"])
    assert recipe.calibration == calibration.sha256
    assert manifest["a_sha256"] == a_fingerprint(recipe, SHAPE, calibration)
    version = device.finish(lease)
    url = "/v1/adapters/alice-movies/versions/1/peft"
    tensors = safetensors.numpy.load(app.get(f"{url}/adapter_model.safetensors").content)
    reader = gguf_tensors(tmp_path / "adapter.gguf", app.get(f"{url}/adapter.gguf").content)
    modules = lora_modules(recipe, SHAPE)
    assert len(tensors) == 2 * len(modules)
    for module in modules:
        a = a_of(calibration, module)
        np.testing.assert_array_equal(tensors[f"base_model.model.{module.name}.lora_A.weight"], a.T)
        name = {"q_proj": "attn_q", "v_proj": "attn_v"}[module.target]
        np.testing.assert_array_equal(reader[f"blk.{module.layer}.{name}.weight.lora_a"], a.T)
    ref = ServedAdapterRef(sha256=version["sha256"], recipe=recipe, shape=SHAPE)
    adapter = ServedModels(home.settings).adapter(ref)
    for module in modules:
        place = (module.layer, module.target)
        scaled = a_of(calibration, module).T * np.float32(recipe.scale)
        np.testing.assert_array_equal(adapter.projections.a[place].numpy(), scaled)


def gguf_tensors(path, data):
    path.write_bytes(data)
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


def test_what_no_job_may_name(home, app, problem, calibration, register):
    def refusal(**recipe):
        answer = app.post("/v1/jobs", json=JOB | {"recipe": JOB["recipe"] | recipe})
        return problem(answer, 422, "invalid-recipe")["detail"]

    assert LIST in refusal(calibration="e" * 64)
    assert "calibration has 3 directions" in refusal(calibration=calibration.sha256, rank=4)
    with home.database.writing() as session:
        bases = BaseRepository(session)
        bases.add(base_entry("other", bases.by_name("tiny").tokenizer_sha256, sha256=OTHER))
    foreign = register(file_for(OTHER))
    assert "not tiny" in refusal(calibration=foreign)
    assert app.get("/v1/jobs").json()["items"] == []
    answer = app.post("/v1/cohorts", json=cohort_request(recipe=JOB["recipe"] | {"calibration": foreign}))
    problem(answer, 422, "invalid-recipe")
    # No sha256 at all: the form of the request is wrong.
    problem(app.post("/v1/jobs", json=JOB | {"recipe": {"calibration": "mine"}}), 422, "invalid-request")


def test_a_run_goes_on_with_its_own_a_only(fleet, app, device, problem, calibration):
    fleet.ready_job(app, recipe=named_by(calibration))
    device.finish(device.lease())
    start = {"adapter": "alice-movies", "revision": "v1"}
    refusal = problem(app.post("/v1/jobs", json=JOB | {"start": start}), 422, "start-mismatch")
    assert "calibration" in refusal["detail"]
    app.submit(start=start, recipe=named_by(calibration))
    body = {name: value for name, value in JOB.items() if name != "recipe"}  # then the recipe is the start's
    again = app.post("/v1/jobs", json=body | {"start": start}).json()
    assert again["recipe"]["calibration"] == calibration.sha256


def test_it_stays_while_it_is_needed(home, fleet, app, device, problem, calibration, remove):
    job = app.submit(recipe=named_by(calibration))
    with pytest.raises(Conflict, match=job["id"]):
        remove(calibration.sha256)
    assert app.post(f"/v1/jobs/{job['id']}/cancel").status_code == 200
    with home.database.reading() as session:
        assert CalibrationRepository(session).user(calibration.sha256) is None
    fleet.ready_job(app, recipe=named_by(calibration))
    device.finish(device.lease())
    with pytest.raises(Conflict, match="version 1 of adapter 'alice-movies'"):
        remove(calibration.sha256)


def test_a_cohort_pins_and_keeps_it(app, calibration, remove):
    cohort = app.post("/v1/cohorts", json=cohort_request(recipe=named_by(calibration))).json()
    assert cohort["a_sha256"] == a_fingerprint(Recipe.model_validate(cohort["recipe"]), SHAPE, calibration)
    with pytest.raises(Conflict, match="cohort 'readers'"):
        remove(calibration.sha256)


@pytest.mark.both_databases
def test_removed(home, app, problem, calibration, register, remove):
    other = register(file_for(seed=1))
    app.submit()  # whose A is random
    with home.database.reading() as session:
        assert referenced(session, [calibration.sha256]) == {calibration.sha256}
        assert {calibration.sha256, other} <= named_files(session)
    with pytest.raises(BadRequest, match="2 calibrations"):
        remove("")
    assert remove(calibration.sha256[:12]) == calibration.sha256
    with pytest.raises(NotFound, match="calibration list"):
        remove(calibration.sha256)
    assert [item["sha256"] for item in app.get(LIST).json()["items"]] == [other]
    with home.database.reading() as session:
        assert referenced(session, [calibration.sha256]) == set()
    problem(app.post("/v1/jobs", json=JOB | {"recipe": named_by(calibration)}), 422, "invalid-recipe")


def test_what_cannot_be_registered(register, home):
    stored_files = home.stored_files()
    with pytest.raises(UnknownBase, match="base add"):
        register(file_for("d" * 64))
    with pytest.raises(InvalidUpload):
        register(b"no calibration")
    assert home.stored_files() == stored_files


def test_a_file_that_is_gone_is_told(home, app, problem, calibration, fleet, device):
    fleet.ready_job(app, recipe=named_by(calibration))
    device.finish(device.lease())
    home.artifacts.delete([calibration.sha256])
    service._loaded.cache_clear()
    refusal = problem(app.get("/v1/adapters/alice-movies/versions/1/peft"), 503, "damaged-file")
    assert "calibration add" in refusal["detail"]
