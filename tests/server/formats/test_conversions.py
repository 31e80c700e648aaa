"""Merged models as the API shows them, and who makes them: claims, heartbeats, lost workers, memory, what is kept."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select, update

from server.artifacts.collection import Collector
from server.bases.repository import BaseRepository
from server.formats.models import Conversion, ConversionState
from server.formats.queue import ConversionQueue
from server.programs.models import Worker
from server.programs.repository import WorkerRepository
from server.programs.waiting import WaitingRepository
from server.worker import CompileWorker
from shared.canonical import sha256_hex
from shared.errors import ConversionFailed, UnsupportedModel
from shared.protocol import PeftFile
from tests.server.conftest import BOTH

DATABASES = BOTH
URL = "/v1/adapters/alice-movies/versions/1/merged"
MIB = 1 << 20


@pytest.fixture
def version(device, lease):
    return device.finish(lease)


@pytest.fixture
def work(home):
    """One worker of the home, in this process: works until nothing waits."""
    worker = CompileWorker(home.settings)
    worker._register()

    def work():
        while worker.look_around() and worker.work():
            pass

    yield work
    worker._database.close()


class Workers:
    """Workers of one home, each call one transaction."""

    def __init__(self, home):
        self.home = home
        with home.database.writing() as session:
            for name in ("one", "two"):
                now = datetime.now(UTC)
                WorkerRepository(session).add(Worker(id=name, pid=1, host=name, started_at=now, seen_at=now))

    def do(self, name, action, *arguments):
        with self.home.database.writing() as session:
            found = getattr(ConversionQueue(session, self.home.settings, name), action)(*arguments)
            session.flush()
            session.expunge_all()
            return found

    def set(self, **values):
        with self.home.database.writing() as session:
            session.execute(update(Conversion).values(**values))

    def memory(self, name, memory_bytes, limited=True):
        with self.home.database.writing() as session:
            WaitingRepository(session).keep_host(name, memory_bytes, limited, datetime.now(UTC))


@pytest.fixture
def workers(home):
    return Workers(home)


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
    assignment = workers.do("one", "claim")
    assert (assignment.version.sha256, workers.do("two", "claim")) == (version["sha256"], None)
    assert app.get(URL).json()["state"] == "converting"
    assert workers.do("one", "keep", assignment.id)
    assert not workers.do("two", "keep", assignment.id)
    assert not workers.do("two", "finish", assignment.id, [])


def test_what_a_lost_worker_still_reports_counts_no_more(app, version, workers):
    app.post(URL)
    lost = workers.do("one", "claim")
    workers.set(lease_expires_at=datetime.now(UTC) - timedelta(seconds=1))
    assert workers.do("two", "claim").id == lost.id
    file = PeftFile(path="config.json", size=1, sha256="a" * 64)
    assert not workers.do("one", "finish", lost.id, [file])
    assert workers.do("two", "finish", lost.id, [file])
    workers.do("one", "fail", lost.id, UnsupportedModel())
    assert [file["path"] for file in app.get(URL).json()["files"]] == ["config.json"]


def test_tries_end(app, version, workers):
    app.post(URL)
    for _ in range(3):
        claimed = workers.do("one", "claim")
        workers.do("two", "vanished", claimed.id, "one")
    assert workers.do("one", "claim") is None
    assert app.get(URL).json()["error"]["code"] == "conversion-failed"
    app.post(URL)
    claimed = workers.do("one", "claim")
    workers.do("one", "release", claimed.id)
    workers.do("one", "claim")
    with workers.home.database.reading() as session:
        assert session.scalars(select(Conversion.attempts)).one() == 1


def test_a_crash_is_tried_again_after_a_while(app, version, workers):
    workers.home.settings = workers.home.settings.model_copy(update={"compile_backoff_seconds": 60})
    app.post(URL)
    claimed = workers.do("one", "claim")
    workers.do("one", "retry", claimed.id, ConversionFailed())
    assert workers.do("one", "claim") is None
    workers.set(next_attempt_at=datetime.now(UTC) - timedelta(seconds=1))
    assert workers.do("one", "claim").id == claimed.id


def test_memory_is_shared_with_compiles(fleet, app, device, version, workers):
    fleet.ready_job(app)
    device.finish(device.lease())
    second = URL.replace("/1/", "/2/")
    app.post(URL)
    app.post(second)
    with workers.home.database.writing() as session:
        first = session.scalars(select(Conversion).order_by(Conversion.number)).first()
        first.memory_bytes = 900 * MIB
    workers.memory("one", 1000 * MIB)
    workers.memory("two", 500 * MIB)
    large = workers.do("one", "claim")
    assert large.version.version == 1
    assert workers.do("one", "claim") is None  # the other does not fit beside it
    workers.set(memory_bytes=2000 * MIB)
    assert workers.do("two", "claim") is None
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
    claimed = [workers.do("one", "claim").version.number for _ in numbers]
    assert claimed[0] != claimed[1]
    assert claimed.index(numbers[2]) < 2
    assert sorted(claimed) == sorted(numbers)


def test_states_go_one_way(app, version, workers):
    app.post(URL)
    with workers.home.database.reading() as session:
        assert session.scalars(select(Conversion.state)).one() is ConversionState.PENDING
    claimed = workers.do("one", "claim")
    workers.do("one", "finish", claimed.id, [PeftFile(path="x", size=1, sha256="a" * 64)])
    assert workers.do("one", "claim") is None
