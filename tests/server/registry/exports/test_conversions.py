"""Merged models as the API shows them, and who makes them: claims, heartbeats, lost workers, memory, what is kept."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select

from server.catalog.bases import BaseRepository
from server.registry.exports.conversion import ConversionHandler
from server.registry.exports.models import Conversion, ConversionState
from server.storage.garbage_collection import Collector
from server.tasks.repository import WorkerRepository
from server.worker import create_worker
from shared.canonical import sha256_hex
from shared.errors import ConversionFailed, UnsupportedModel
from shared.protocol import PeftFile
from tests.server.conftest import BOTH, Workers

DATABASES = BOTH
URL = "/v1/adapters/alice-movies/versions/1/merged"
MIB = 1 << 20


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


class Converters(Workers):
    """Workers that merge adapters."""

    def __init__(self, home):
        super().__init__(home)
        for name in ("one", "two"):
            Workers(home, name, host=name)

    def queue(self, name, action, *arguments):
        handler = ConversionHandler(self.home.settings, self.home.database, self.home.artifacts)
        return self.do(name, handler, action, *arguments)

    def claim(self, name):
        return self.queue(name, "claim")

    def complete(self, name, claim, *files):
        return self.queue(name, "complete", claim, [self.file(path) for path in files])

    def file(self, path):
        return PeftFile(path=path, size=len(path), sha256=self.home.artifacts.put(path.encode()))

    def memory(self, name, memory_bytes, limited=True):
        with self.home.database.writing() as session:
            WorkerRepository(session).keep_host(name, memory_bytes, limited, datetime.now(UTC))


@pytest.fixture
def workers(home):
    return Converters(home)


def test_asked_for_made_and_downloaded(home, app, version, work, problem):
    problem(app.get(URL), 404, "not-found")
    response = app.post(URL)
    assert (response.status_code, response.headers["location"]) == (202, URL)
    asked = response.json()
    assert (asked["adapter"], asked["version"], asked["state"], asked["files"]) == ("alice-movies", 1, "pending", [])
    assert app.get(URL).json() == asked
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


def test_asked_for_many_times_it_is_one(home, app, version):
    again = {"Idempotency-Key": "k"}
    first = app.post(URL, headers=again)
    assert app.post(URL, headers=again).json() == first.json()
    assert app.post(URL).json() == first.json()
    with home.database.reading() as session:
        assert session.scalar(select(func.count()).select_from(Conversion)) == 1


def test_what_cannot_be_asked_for(fleet, home, app, version, problem):
    problem(app.post("/v1/adapters/nothing/versions/1/merged"), 404, "adapter-not-found")
    problem(app.post("/v1/adapters/alice-movies/versions/2/merged"), 404, "revision-not-found")
    app.post(URL)
    other = fleet.app("other")
    for answer in (other.get(URL), other.post(URL), other.get(f"{URL}/config.json")):
        problem(answer, 404, "adapter-not-found")
    problem(app.get(f"{URL}/..%2fconfig.json"), 404, "not-found")
    with home.database.writing() as session:
        BaseRepository(session).by_name("tiny").sha256 = "c" * 64
    problem(app.post(URL), 422, "base-mismatch")


def test_a_base_that_was_exchanged_meanwhile_fails_it(home, app, version, work):
    app.post(URL)
    with home.database.writing() as session:
        BaseRepository(session).by_name("tiny").sha256 = "c" * 64
    work()
    assert app.get(URL).json()["error"]["code"] == "base-mismatch"
    assert home.conversions() == []


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


def test_files_are_kept_as_long_as_their_version(home, app, version, work):
    app.post(URL)
    work()
    ready = app.get(URL).json()
    assert Collector(home.database, home.artifacts).collect(timedelta(0)).deleted == 0
    assert app.get(f"{URL}/model.safetensors").status_code == 200
    with home.database.writing() as session:
        session.delete(session.scalars(select(Conversion)).one())
    assert Collector(home.database, home.artifacts).collect(timedelta(0)).deleted == len(ready["files"])


def test_a_claim_is_one_workers(app, version, workers):
    app.post(URL)
    claim = workers.claim("one")
    assert (claim.order.version.sha256, workers.claim("two")) == (version["sha256"], None)
    assert app.get(URL).json()["state"] == "converting"
    assert workers.queue("one", "heartbeat", claim)
    assert not workers.queue("two", "heartbeat", claim)
    assert not workers.complete("two", claim)


def test_what_a_lost_worker_still_reports_counts_no_more(app, version, workers):
    app.post(URL)
    lost = workers.claim("one")
    workers.home.set_task(lease_expires_at=datetime.now(UTC) - timedelta(seconds=1))
    assert workers.claim("two").subject == lost.subject
    assert not workers.complete("one", lost, "config.json")
    assert workers.complete("two", lost, "config.json")
    workers.queue("one", "fail", lost, UnsupportedModel())
    assert [file["path"] for file in app.get(URL).json()["files"]] == ["config.json"]


def test_tries_end(app, version, workers):
    app.post(URL)
    for _ in range(3):
        claimed = workers.claim("one")
        workers.queue("two", "take_back", workers.home.task(claimed.subject), "one")
    assert workers.claim("one") is None
    assert app.get(URL).json()["error"]["code"] == "conversion-failed"
    app.post(URL)
    claimed = workers.claim("one")
    workers.queue("one", "release", claimed)
    workers.claim("one")
    assert workers.home.task(claimed.subject).attempts == 1


def test_a_crash_is_tried_again_after_a_while(app, version, workers):
    workers.home.settings = workers.home.settings.model_copy(update={"compile_backoff_seconds": 60})
    app.post(URL)
    claimed = workers.claim("one")
    workers.queue("one", "retry", claimed, ConversionFailed())
    assert workers.claim("one") is None
    workers.home.set_task(not_before=datetime.now(UTC) - timedelta(seconds=1))
    assert workers.claim("one").subject == claimed.subject


def test_memory_is_shared_with_compiles(fleet, app, device, version, workers):
    fleet.ready_job(app)
    device.finish(device.lease())
    second = URL.replace("/1/", "/2/")
    app.post(URL)
    app.post(second)
    with workers.home.database.reading() as session:
        first, other = session.scalars(select(Conversion.id).order_by(Conversion.number))
    workers.home.set_task(first, memory_bytes=900 * MIB)
    workers.memory("one", 1000 * MIB)
    workers.memory("two", 500 * MIB)
    large = workers.claim("one")
    assert large.order.version.version == 1
    assert workers.claim("one") is None  # the other does not fit beside it
    workers.home.set_task(other, memory_bytes=2000 * MIB)
    assert workers.claim("two") is None
    assert app.get(second).json()["error"]["code"] == "conversion-too-large"


def test_tenants_take_turns(fleet, app, device, version, workers):
    fleet.ready_job(app)
    device.finish(device.lease())
    stranger = fleet.device("other")
    other = fleet.app("other")
    fleet.ready_job(other)
    stranger.finish(stranger.lease())
    app.post(URL)
    app.post(URL.replace("/1/", "/2/"))
    other.post(URL)
    with workers.home.database.reading() as session:
        numbers = list(session.scalars(select(Conversion.version_number).order_by(Conversion.number)))
    claimed = [workers.claim("one").order.version.number for _ in numbers]
    assert claimed[0] != claimed[1]
    assert claimed.index(numbers[2]) < 2
    assert sorted(claimed) == sorted(numbers)


def test_states_go_one_way(app, version, workers):
    app.post(URL)
    with workers.home.database.reading() as session:
        assert session.scalars(select(Conversion.state)).one() is ConversionState.PENDING
    claimed = workers.claim("one")
    workers.complete("one", claimed, "x")
    assert workers.claim("one") is None
