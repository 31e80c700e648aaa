"""Who compiles what: claims, heartbeats, lost workers, and what becomes of the jobs."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, update

from server.programs.compilation import CompileQueue
from server.programs.models import Program, ProgramBlob, ProgramState, Worker
from server.programs.repository import WorkerRepository
from shared.errors import CompileFailed, InvalidRecipe
from shared.program import ProgramFile, ProgramManifest, SignedManifest
from shared.recipe import Recipe
from tests.server.conftest import SHAPE


class Workers:
    """Workers of one home, each call one transaction."""

    def __init__(self, home):
        self.home = home
        with home.database.writing() as session:
            for name in ("one", "two"):
                now = datetime.now(UTC)
                WorkerRepository(session).add(Worker(id=name, pid=1, started_at=now, seen_at=now))

    def do(self, name, action, *arguments):
        with self.home.database.writing() as session:
            return getattr(CompileQueue(session, self.home.settings, name), action)(*arguments)

    def program(self):
        with self.home.database.reading() as session:
            found = session.scalars(select(Program)).one()
            session.expunge_all()
            return found

    def recompile(self):
        """Wants the program anew, as after a restored backup or a compiler that was mended."""
        with self.home.database.writing() as session:
            session.execute(update(Program).values(state=ProgramState.PENDING))

    def expire(self):
        with self.home.database.writing() as session:
            session.execute(update(Program).values(lease_expires_at=datetime.now(UTC) - timedelta(seconds=1)))


@pytest.fixture
def workers(home):
    return Workers(home)


def signed(job, version=1):
    recipe = Recipe.model_validate(job["recipe"])
    files = tuple(
        ProgramFile(role=role, name=role, size=1, sha256=letter * 64)
        for role, letter in (("program", "a"), ("weights", "b"), ("tokenizer", "c"))
    )
    manifest = ProgramManifest(
        version=version,
        recipe=recipe,
        recipe_id=recipe.id,
        shape=SHAPE,
        size=48,
        a_sha256="d" * 64,
        score_rows=4,
        files=files,
        planned_bytes=0,
        flops_per_step=0,
        delegates=0,
        nodes=0,
        executorch="1",
    )
    return SignedManifest(manifest=manifest, key_id="k", signature="s")


@pytest.fixture
def state(app):
    return lambda job: app.get(f"/v1/jobs/{job['id']}").json()["state"]


def test_nothing_to_do(workers):
    assert workers.do("one", "claim") is None


def test_a_claim_is_one_worker_s(app, workers, state):
    job = app.submit()
    assignment = workers.do("one", "claim")
    assert assignment.recipe.id == job["recipe_id"]
    assert assignment.source == str(workers.home.source)
    assert workers.do("two", "claim") is None
    assert state(job) == "compiling"
    assert app.submit(adapter="later")["state"] == "compiling"


def test_done(app, workers, state):
    jobs = [app.submit(adapter=f"a{number}") for number in range(3)]
    workers.do("one", "claim")
    assert workers.do("one", "finish", jobs[0]["recipe_id"], signed(jobs[0])) is True
    assert [state(job) for job in jobs] == ["ready"] * 3
    assert workers.do("two", "claim") is None


def test_a_dead_worker_s_program_is_another_s_and_counts_once(app, workers, state):
    job = app.submit()
    workers.do("one", "claim")
    workers.expire()
    assert workers.do("two", "claim").recipe.id == job["recipe_id"]
    # The first was only slow, and reports after all.
    assert workers.do("one", "keep", job["recipe_id"]) is False
    assert workers.do("one", "finish", job["recipe_id"], signed(job)) is False
    workers.do("one", "fail", job["recipe_id"], InvalidRecipe("late"))
    workers.do("one", "retry", job["recipe_id"], CompileFailed("late"))
    workers.do("one", "release", job["recipe_id"])
    assert state(job) == "compiling"
    assert workers.do("two", "finish", job["recipe_id"], signed(job)) is True
    assert state(job) == "ready"
    with workers.home.database.reading() as session:
        assert len(session.scalars(select(ProgramBlob)).all()) == 3


def test_heartbeats_keep_it(app, workers):
    job = app.submit()
    workers.do("one", "claim")
    workers.expire()
    assert workers.do("one", "keep", job["recipe_id"]) is True
    assert workers.do("two", "claim") is None


def test_failure_ends_the_jobs_and_another_try_may_be_asked_for(app, workers, state):
    job = app.submit()
    workers.do("one", "claim")
    workers.do("one", "fail", job["recipe_id"], InvalidRecipe("rank: too large"))
    view = app.get(f"/v1/jobs/{job['id']}").json()
    assert view["state"] == "failed"
    assert view["error"] == {"code": "invalid-recipe", "detail": "rank: too large"}
    assert workers.do("one", "claim") is None
    again = app.submit()
    assert again["state"] == "queued"
    assert workers.do("one", "claim") is not None
    assert workers.program().attempts == 1


def test_crashes_are_tried_again_and_then_fail(app, workers, state):
    job = app.submit()
    for _ in range(2):
        workers.do("one", "claim")
        workers.do("one", "retry", job["recipe_id"], CompileFailed("died"))
        assert state(job) == "queued"
    workers.do("one", "claim")
    workers.do("one", "retry", job["recipe_id"], CompileFailed("died"))
    view = app.get(f"/v1/jobs/{job['id']}").json()
    assert (view["state"], view["error"]["code"]) == ("failed", "compile-failed")


def test_a_program_that_kills_its_workers_fails(app, workers, state):
    job = app.submit()
    for _ in range(3):
        assert workers.do("one", "claim") is not None
        workers.expire()
    assert workers.do("two", "claim") is None
    view = app.get(f"/v1/jobs/{job['id']}").json()
    assert (view["state"], view["error"]["code"]) == ("failed", "compile-failed")


def test_a_worker_that_stops_in_order_costs_no_try(app, workers, state):
    job = app.submit()
    for _ in range(5):
        workers.do("one", "claim")
        workers.do("one", "release", job["recipe_id"])
    assert state(job) == "queued"
    assert workers.program().attempts == 0


def test_what_nobody_waits_for_is_not_compiled(app, workers):
    job, other = app.submit(), app.submit(adapter="other")
    workers.do("one", "claim")
    app.post(f"/v1/jobs/{job['id']}/cancel")
    assert workers.do("one", "keep", job["recipe_id"]) is True
    app.post(f"/v1/jobs/{other['id']}/cancel")
    assert workers.do("one", "keep", job["recipe_id"]) is False
    assert workers.program().state is ProgramState.PENDING
    assert workers.do("one", "claim") is None
    assert app.submit()["state"] == "queued"
    assert workers.do("one", "claim") is not None


def test_oldest_first(app, workers):
    first = app.submit()
    second = app.submit(adapter="b", recipe={"rank": 3})
    assert workers.do("one", "claim").recipe.id == first["recipe_id"]
    assert workers.do("two", "claim").recipe.id == second["recipe_id"]


def test_jobs_of_all_tenants_share_a_program(fleet, app, workers, state):
    job = app.submit()
    stranger = fleet.app("other")
    theirs = stranger.submit()
    workers.do("one", "claim")
    workers.do("one", "finish", job["recipe_id"], signed(job))
    assert state(job) == "ready"
    assert stranger.get(f"/v1/jobs/{theirs['id']}").json()["state"] == "ready"


def test_versions_rise_with_the_programs_that_were_published(app, workers):
    """A device refuses an older program than it has seen, so no published one may have a number twice."""
    job = app.submit()
    recipe_id = job["recipe_id"]
    assert workers.do("one", "claim").version == 1
    workers.do("one", "retry", recipe_id, CompileFailed("died"))
    assert workers.do("one", "claim").version == 1
    workers.do("one", "fail", recipe_id, InvalidRecipe("no"))
    again = app.submit()
    assert workers.do("two", "claim").version == 1
    assert workers.do("two", "finish", recipe_id, signed(again, 1)) is True
    for version in (2, 3):
        workers.recompile()
        waiting = app.submit()
        assert waiting["state"] == "queued"
        assert workers.do("one", "claim").version == version
        workers.do("one", "fail", recipe_id, InvalidRecipe("a bad day"))
        app.submit()
        assert workers.do("two", "claim").version == version
        assert workers.do("two", "finish", recipe_id, signed(waiting, version)) is True
    assert app.get(f"/v1/programs/{recipe_id}").json()["manifest"]["version"] == 3
    with workers.home.database.reading() as session:
        # The version before keeps its files: devices may be training with it.
        assert sorted(session.scalars(select(ProgramBlob.version))) == [2, 2, 2, 3, 3, 3]
