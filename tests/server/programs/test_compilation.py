"""Who compiles what: claims, heartbeats, lost workers, and what becomes of the jobs."""

import pytest
from sqlalchemy import select

from server.catalog.bases import BaseModelEntry
from server.identity.signing_keys.service import KeyService
from server.programs.compilation import CompileHandler
from server.programs.compiler_process import CompilerCrashed
from server.programs.service import Program, ProgramBlob, ProgramState
from server.tasks.child_process import Stopped
from shared.chat_template import ChatTemplate
from shared.errors import InvalidRecipe
from shared.recipe import Recipe
from shared.signing import verify_manifest
from tests.server import fake_compiler
from tests.server.homes import Workers


class Compilers(Workers):
    """Workers that compile; a program is named by its recipe's id."""

    def __init__(self, home, *names, **where):
        super().__init__(home, *names, **where)
        self.settings, self.claims = home.settings, {}

    def handler(self):
        return CompileHandler(self.settings, self.home.artifacts)

    def queue(self, name, action, *arguments):
        self.home.settings = self.settings
        return self.do(name, self.handler(), action, *arguments)

    def claim(self, name):
        """The order that the worker gets, or None."""
        self.home.settings = self.settings
        claim = super().claim(name, self.handler())
        if claim is None:
            return None
        self.claims[name, claim.subject] = claim
        return claim.order

    def claim_of(self, name, recipe_id):
        return self.claims[name, recipe_id]

    def heartbeat(self, name, recipe_id):
        return self.queue(name, "heartbeat", self.claim_of(name, recipe_id))

    def complete(self, name, job, version=1):
        return self.queue(name, "end", self.claim_of(name, job["recipe_id"]), manifest(self.home, job, version))

    def fail(self, name, recipe_id, error):
        self.queue(name, "end", self.claim_of(name, recipe_id), error)

    def release(self, name, recipe_id):
        self.queue(name, "end", self.claim_of(name, recipe_id), Stopped())

    def program(self, recipe_id=None):
        conditions = () if recipe_id is None else (Program.recipe_id == recipe_id,)
        return self.home.scalar(select(Program).where(*conditions))

    def recompile(self):
        """Wants the program anew, as after a restored backup or a compiler that was mended."""
        self.home.change(Program, state=ProgramState.PENDING)

    def lose(self, name):
        super().lose(name, self.handler())


@pytest.fixture
def workers(home):
    return Compilers(home, "one", "two")


def manifest(home, job, version=1):
    """Of a compiled program, whose files are stored."""
    with home.artifacts.workspace("in-test") as workspace:
        built = fake_compiler.build(Recipe.model_validate(job["recipe"]), home.source, workspace / "program")
        for file in built.files:
            home.artifacts.adopt(workspace / "program" / file.name, file.sha256)
    return built.model_copy(update={"version": version})


@pytest.mark.both_databases
def test_a_dead_worker_s_program_is_another_s_and_counts_once(app, workers, state):
    job = app.submit()
    workers.claim("one")
    workers.lose("one")
    assert workers.claim("two").recipe.id == job["recipe_id"]
    # The first was only slow, and reports after all.
    assert workers.heartbeat("one", job["recipe_id"]) is False
    assert workers.complete("one", job) is False
    workers.fail("one", job["recipe_id"], InvalidRecipe("late"))
    workers.fail("one", job["recipe_id"], CompilerCrashed("late"))
    workers.release("one", job["recipe_id"])
    assert state(job) == "compiling"
    assert workers.complete("two", job) is True
    assert state(job) == "ready"
    assert len(workers.home.scalars(select(ProgramBlob))) == 3


def test_a_program_carries_its_bases_chat_template(app, workers):
    template = ChatTemplate(template="{{ messages[0].content }}")
    workers.home.change(BaseModelEntry, chat_template=template)
    job = app.submit()
    workers.claim("one")
    assert workers.complete("one", job) is True
    signed = workers.program().signed
    assert signed.manifest.chat_template == template
    with workers.home.database.reading() as session:
        key = KeyService(session, workers.settings).private().public_key()
    assert verify_manifest(signed, key).chat_template == template


def test_failure_and_workers_that_die_of_it_end_the_jobs(app, workers, state):
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
    for _ in range(2):
        workers.lose("one")
        assert workers.claim("one") is not None
    workers.lose("one")
    assert workers.claim("two") is None
    view = app.get(f"/v1/jobs/{again['id']}").json()
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


def test_versions_rise_with_the_programs_that_were_published(app, workers):
    """A device refuses an older program than it has seen, so no published one may have a number twice."""
    job = app.submit()
    recipe_id = job["recipe_id"]
    assert workers.claim("one").version == 1
    workers.fail("one", recipe_id, CompilerCrashed("died"))
    assert workers.claim("one").version == 1
    workers.fail("one", recipe_id, InvalidRecipe("no"))
    again = app.submit()
    assert workers.claim("two").version == 1
    assert workers.complete("two", again, 1) is True
    workers.recompile()
    waiting = app.submit()
    assert waiting["state"] == "queued"
    assert workers.claim("one").version == 2
    workers.fail("one", recipe_id, InvalidRecipe("a bad day"))
    app.submit()
    assert workers.claim("two").version == 2
    assert workers.complete("two", waiting, 2) is True
    assert app.get(f"/v1/programs/{recipe_id}").json()["manifest"]["version"] == 2
