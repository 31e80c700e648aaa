"""Merged models as the API shows them: asked for, made, refused, failed, kept. The queue: tests/server/programs."""

from datetime import UTC, datetime, timedelta

import pytest

from server.catalog.bases import BaseRepository
from server.registry.exports.conversion import ConversionHandler
from server.tasks.repository import WorkerRepository
from server.worker import create_worker
from shared.canonical import sha256_hex
from tests.server.conftest import Workers

URL = "/v1/adapters/alice-movies/versions/1/merged"


@pytest.fixture
def version(device, lease):
    return device.finish(lease)


@pytest.fixture
def work(home):
    """One worker of the home, in this process: works until nothing waits."""
    worker = create_worker(home.settings, home.database)
    worker.register()

    def work():
        while worker.look_around() and worker.work():
            pass

    return work


@pytest.mark.both_databases
def test_asked_for_made_and_downloaded(home, app, version, work, problem):
    problem(app.get(URL), 404, "not-found")
    response = app.post(URL)
    assert (response.status_code, response.headers["location"]) == (202, URL)
    conversion = response.json()
    assert (conversion["adapter"], conversion["version"], conversion["state"], conversion["files"]) == (
        "alice-movies",
        1,
        "pending",
        [],
    )
    assert app.get(URL).json() == app.post(URL).json() == conversion
    problem(app.get(f"{URL}/config.json"), 404, "file-not-in-adapter")
    work()
    ready = app.get(URL).json()
    assert (ready["state"], ready["error"]) == ("ready", None)
    assert [file["path"] for file in ready["files"]] == ["config.json", "model.safetensors"]
    for file in ready["files"]:
        answer = app.get(f"{URL}/{file['path']}")
        assert (len(answer.content), sha256_hex(answer.content)) == (file["size"], file["sha256"])
        assert answer.headers["etag"] == f'"{file["sha256"]}"'
        assert app.get(f"{URL}/{file['path']}", headers={"Range": "bytes=1-2"}).content == answer.content[1:3]
    assert app.post(URL).json() == ready
    work()
    assert len(home.conversions()) == 1


def test_each_form_is_made_for_itself(home, app, version, work, problem):
    app.post(URL)
    response = app.post(f"{URL}?form=gguf-q8_0")
    assert (response.headers["location"], response.json()["form"]) == (f"{URL}?form=gguf-q8_0", "gguf-q8_0")
    problem(app.get(f"{URL}?form=gguf-f16"), 404, "not-found")
    problem(app.post(f"{URL}?form=gguf-q2"), 422, "invalid-request")
    work()
    assert [app.get(f"{URL}?form={form}").json()["state"] for form in ("directory", "gguf-q8_0")] == ["ready"] * 2
    assert len(home.conversions()) == 2
    assert app.get(f"{URL}/config.json?form=gguf-q8_0").content == app.get(f"{URL}/config.json").content


def test_what_cannot_be_merged(home, app, version, work, problem):
    problem(app.post("/v1/adapters/alice-movies/versions/2/merged"), 404, "revision-not-found")
    app.post(URL)
    problem(app.get(f"{URL}/..%2fconfig.json"), 404, "not-found")
    with home.database.writing() as session:
        BaseRepository(session).by_name("tiny").sha256 = "c" * 64
    work()
    assert app.get(URL).json()["error"]["code"] == "base-mismatch"
    assert home.conversions() == []
    problem(app.post(URL), 422, "base-mismatch")


def test_errors_crashes_and_lies(home, app, version, work):
    home.convert_so(error={"code": "unsupported-model", "detail": "why"})
    app.post(URL)
    work()
    view = app.get(URL).json()
    assert (view["state"], view["error"]) == ("failed", {"code": "unsupported-model", "detail": "why"})
    for behaviour, code, starts in (
        ({"crash": True}, "conversion-failed", 3),
        ({"tamper": True}, "untrusted", 1),
        ({"path": "../escaped"}, "conversion-failed", 1),
    ):
        before = len(home.conversions())
        home.convert_so(**behaviour)
        assert app.post(URL).json()["state"] == "pending"
        work()
        assert app.get(URL).json()["error"]["code"] == code
        assert len(home.conversions()) - before == starts
    home.convert_so()
    app.post(URL)
    work()
    assert app.get(URL).json()["state"] == "ready"


def test_a_worker_dies_of_it_again_and_again_or_no_machine_has_room(home, app, version):
    workers = Workers(home, "one")
    handler = ConversionHandler(home.settings, home.database, home.artifacts)

    def error():
        assert workers.do("one", handler, "claim") is None
        return app.get(URL).json()["error"]["code"]

    app.post(URL)
    for _ in range(home.settings.compile_attempts):
        claim = workers.do("one", handler, "claim")
        assert app.get(URL).json()["state"] == "converting"
        home.set_task(lease_expires_at=datetime.now(UTC) - timedelta(seconds=1))
    assert error() == "conversion-failed"
    app.post(URL)
    with home.database.writing() as session:
        WorkerRepository(session).keep_host("", 1000, True, datetime.now(UTC))
    home.set_task(claim.subject, memory_bytes=2000)
    assert error() == "conversion-too-large"
