"""Who compiles what: claims, heartbeats, lost workers, and what becomes of the jobs."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, update

from server.programs.compilation import CompileHandler
from server.programs.service import Program, ProgramBlob, ProgramState
from server.tasks.queue import Claim
from shared.errors import CompileFailed, InvalidRecipe
from shared.program import ProgramFile, ProgramManifest
from shared.recipe import Recipe
from tests.server.conftest import SHAPE, Workers


class Compilers(Workers):
    """Workers that compile; a program is named by its recipe's id."""

    def __init__(self, home, *names, **where):
        super().__init__(home, *names, **where)
        self.settings, self.orders = home.settings, {}

    def queue(self, name, action, *arguments):
        self.home.settings = self.settings
        return self.do(name, CompileHandler(self.settings, self.home.artifacts), action, *arguments)

    def claim(self, name):
        """The order that the worker gets, or None."""
        claim = self.queue(name, "claim")
        if claim is None:
            return None
        self.orders[claim.subject] = claim.order
        return claim.order

    def held(self, recipe_id):
        return Claim("compile", recipe_id, self.orders[recipe_id])

    def heartbeat(self, name, recipe_id):
        return self.queue(name, "heartbeat", self.held(recipe_id))

    def complete(self, name, job, version=1):
        return self.queue(name, "complete", self.held(job["recipe_id"]), manifest(self.home, job, version))

    def fail(self, name, recipe_id, error):
        self.queue(name, "fail", self.held(recipe_id), error)

    def retry(self, name, recipe_id, error):
        self.queue(name, "retry", self.held(recipe_id), error)

    def release(self, name, recipe_id):
        self.queue(name, "release", self.held(recipe_id))

    def program(self, recipe_id=None):
        statement = select(Program) if recipe_id is None else select(Program).where(Program.recipe_id == recipe_id)
        with self.home.database.reading() as session:
            found = session.scalars(statement).one()
            session.expunge_all()
            return found

    def recompile(self):
        """Wants the program anew, as after a restored backup or a compiler that was mended."""
        with self.home.database.writing() as session:
            session.execute(update(Program).values(state=ProgramState.PENDING))

    def expire(self):
        self.home.set_task(lease_expires_at=datetime.now(UTC) - timedelta(seconds=1))


@pytest.fixture
def workers(home):
    return Compilers(home, "one", "two")


def manifest(home, job, version=1):
    recipe = Recipe.model_validate(job["recipe"])
    files = tuple(
        ProgramFile(role=role, name=role, size=len(role), sha256=home.artifacts.put(role.encode()))
        for role in ("program", "weights", "tokenizer")
    )
    return ProgramManifest(
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


@pytest.fixture
def state(app):
    return lambda job: app.get(f"/v1/jobs/{job['id']}").json()["state"]


def test_nothing_to_do(workers):
    assert workers.claim("one") is None


def test_a_claim_is_one_worker_s(app, workers, state):
    job = app.submit()
    assignment = workers.claim("one")
    assert assignment.recipe.id == job["recipe_id"]
    assert assignment.source == str(workers.home.source)
    assert workers.claim("two") is None
    assert state(job) == "compiling"
    assert app.submit(adapter="later")["state"] == "compiling"


def test_done(app, workers, state):
    jobs = [app.submit(adapter=f"a{number}") for number in range(3)]
    workers.claim("one")
    assert workers.complete("one", jobs[0]) is True
    assert [state(job) for job in jobs] == ["ready"] * 3
    assert workers.claim("two") is None


def test_a_dead_worker_s_program_is_another_s_and_counts_once(app, workers, state):
    job = app.submit()
    workers.claim("one")
    workers.expire()
    assert workers.claim("two").recipe.id == job["recipe_id"]
    # The first was only slow, and reports after all.
    assert workers.heartbeat("one", job["recipe_id"]) is False
    assert workers.complete("one", job) is False
    workers.fail("one", job["recipe_id"], InvalidRecipe("late"))
    workers.retry("one", job["recipe_id"], CompileFailed("late"))
    workers.release("one", job["recipe_id"])
    assert state(job) == "compiling"
    assert workers.complete("two", job) is True
    assert state(job) == "ready"
    with workers.home.database.reading() as session:
        assert len(session.scalars(select(ProgramBlob)).all()) == 3


def test_heartbeats_keep_it(app, workers):
    job = app.submit()
    workers.claim("one")
    workers.expire()
    assert workers.heartbeat("one", job["recipe_id"]) is True
    assert workers.claim("two") is None


def test_failure_ends_the_jobs_and_another_try_may_be_asked_for(app, workers, state):
    job = app.submit()
    workers.claim("one")
    workers.fail("one", job["recipe_id"], InvalidRecipe("rank: too large"))
    view = app.get(f"/v1/jobs/{job['id']}").json()
    assert view["state"] == "failed"
    assert view["error"] == {"code": "invalid-recipe", "detail": "rank: too large"}
    assert workers.claim("one") is None
    again = app.submit()
    assert again["state"] == "queued"
    assert workers.claim("one") is not None
    assert workers.home.task(workers.program().recipe_id).attempts == 1


def test_crashes_are_tried_again_and_then_fail(app, workers, state):
    job = app.submit()
    for _ in range(2):
        workers.claim("one")
        workers.retry("one", job["recipe_id"], CompileFailed("died"))
        assert state(job) == "queued"
    workers.claim("one")
    workers.retry("one", job["recipe_id"], CompileFailed("died"))
    view = app.get(f"/v1/jobs/{job['id']}").json()
    assert (view["state"], view["error"]["code"]) == ("failed", "compile-failed")


def test_a_program_that_kills_its_workers_fails(app, workers, state):
    job = app.submit()
    for _ in range(3):
        assert workers.claim("one") is not None
        workers.expire()
    assert workers.claim("two") is None
    view = app.get(f"/v1/jobs/{job['id']}").json()
    assert (view["state"], view["error"]["code"]) == ("failed", "compile-failed")


def test_a_worker_that_stops_in_order_costs_no_try(app, workers, state):
    job = app.submit()
    for _ in range(5):
        workers.claim("one")
        workers.release("one", job["recipe_id"])
    assert state(job) == "queued"
    assert workers.home.task(workers.program().recipe_id).attempts == 0


def test_what_nobody_waits_for_is_not_compiled(app, workers):
    job, other = app.submit(), app.submit(adapter="other")
    workers.claim("one")
    app.post(f"/v1/jobs/{job['id']}/cancel")
    assert workers.heartbeat("one", job["recipe_id"]) is True
    app.post(f"/v1/jobs/{other['id']}/cancel")
    assert workers.heartbeat("one", job["recipe_id"]) is False
    assert workers.program().state is ProgramState.PENDING
    assert workers.claim("one") is None
    assert app.submit()["state"] == "queued"
    assert workers.claim("one") is not None


def test_oldest_first(app, workers):
    first = app.submit()
    second = app.submit(adapter="b", recipe={"rank": 3})
    assert workers.claim("one").recipe.id == first["recipe_id"]
    assert workers.claim("two").recipe.id == second["recipe_id"]


def test_jobs_of_all_tenants_share_a_program(fleet, app, workers, state):
    job = app.submit()
    stranger = fleet.app("other")
    theirs = stranger.submit()
    workers.claim("one")
    workers.complete("one", job)
    assert state(job) == "ready"
    assert stranger.get(f"/v1/jobs/{theirs['id']}").json()["state"] == "ready"


def test_versions_rise_with_the_programs_that_were_published(app, workers):
    """A device refuses an older program than it has seen, so no published one may have a number twice."""
    job = app.submit()
    recipe_id = job["recipe_id"]
    assert workers.claim("one").version == 1
    workers.retry("one", recipe_id, CompileFailed("died"))
    assert workers.claim("one").version == 1
    workers.fail("one", recipe_id, InvalidRecipe("no"))
    again = app.submit()
    assert workers.claim("two").version == 1
    assert workers.complete("two", again, 1) is True
    for version in (2, 3):
        workers.recompile()
        waiting = app.submit()
        assert waiting["state"] == "queued"
        assert workers.claim("one").version == version
        workers.fail("one", recipe_id, InvalidRecipe("a bad day"))
        app.submit()
        assert workers.claim("two").version == version
        assert workers.complete("two", waiting, version) is True
    assert app.get(f"/v1/programs/{recipe_id}").json()["manifest"]["version"] == 3
    with workers.home.database.reading() as session:
        # The version before keeps its files: devices may be training with it.
        assert sorted(session.scalars(select(ProgramBlob.version))) == [2, 2, 2, 3, 3, 3]
