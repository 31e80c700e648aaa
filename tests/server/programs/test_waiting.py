"""Which program is compiled next: tenants' turns, and what a machine has memory for."""

from datetime import timedelta

import pytest

from server.programs.compilation import CompileHandler
from server.programs.compiler_process import CompilerCrashed
from server.tasks import queue
from server.tasks.repository import WorkerProcess
from tests.server.conftest import BOTH
from tests.server.homes import Workers, at_once
from tests.server.programs.test_compilation import Compilers

DATABASES = BOTH  # the queue is read and locked by statements that differ
GIB = 1 << 30
SIZES = {}  # by recipe id
SEVEN_BILLION = 28 * GIB  # as large as a program of seven billion weights takes, when 32 GiB are to suffice


class SizedHandler(CompileHandler):
    """Compiles of which a test says how large they are."""

    def memory_bytes(self, session, subject):
        estimated = super().memory_bytes(session, subject)
        assert estimated > 400 << 20
        return SIZES.get(subject, estimated)


class Machines(Compilers):
    """Machines with workers, each of whose calls is one transaction."""

    def handler(self):
        return SizedHandler(self.settings, self.home.artifacts)

    def worker(self, name, host="alone", memory=32 * GIB, limited=True):
        """A worker on a machine that gives so much to compiles."""
        Workers(self.home, name, host=host)
        if memory:
            with self.home.database.writing() as session:
                worker = session.get_one(WorkerProcess, name)
                worker.memory_bytes, worker.limited = memory, limited
        return name

    def claim(self, name):
        """The recipe id that the worker gets, or None."""
        order = super().claim(name)
        return None if order is None else order.recipe.id

    def finish(self, name, job):
        assert self.complete(name, job) is True

    def takes(self, job, size):
        """What compiling a job's program is thought to take, bytes."""
        SIZES[job["recipe_id"]] = size


@pytest.fixture
def machines(home):
    SIZES.clear()
    return Machines(home)


@pytest.fixture
def many(fleet):
    """Jobs of a tenant, each with a recipe of its own."""
    actors = {}

    def many(count, tenant="default", first_rank=2, **changes):
        if tenant not in actors:
            actors[tenant] = fleet.app(tenant)
        return [
            actors[tenant].submit(adapter=f"{tenant}-{rank}", recipe={"rank": rank}, **changes)
            for rank in range(first_rank, first_rank + count)
        ]

    return many


def ids(*jobs):
    return [job["recipe_id"] for job in jobs]


def test_the_oldest_first(app, machines, many):
    first, second = many(2)
    again = app.submit(adapter="again", recipe={"rank": 3})
    assert again["recipe_id"] == second["recipe_id"]
    worker = machines.worker("one")
    assert [machines.claim(worker) for _ in range(2)] == ids(first, second)
    assert machines.claim(worker) is None


def test_another_tenants_request_brings_a_program_forward(fleet, machines, many):
    flood = many(4, "flood")
    late = fleet.app("late").submit(adapter="late", recipe={"rank": 5})
    assert late["recipe_id"] == flood[3]["recipe_id"]
    worker = machines.worker("one")
    assert [machines.claim(worker) for _ in range(4)] == ids(flood[0], flood[3], flood[1], flood[2])
    assert machines.claim(worker) is None


def test_a_tenant_with_many_recipes_does_not_starve_another(machines, many):
    flood = many(6, "flood", priority=10)
    worker = machines.worker("one")
    assert [machines.claim(worker) for _ in range(3)] == ids(*flood[:3])
    # A turn each while both have something, whatever they call urgent; who comes late has saved up no turns.
    late = many(2, "late", first_rank=100, priority=-10)
    assert [machines.claim(worker) for _ in range(5)] == ids(late[0], flood[3], late[1], *flood[4:])


def test_two_large_programs_never_run_at_once(machines, many):
    large, larger, small, smaller = many(4)
    for job in (large, larger):
        machines.takes(job, SEVEN_BILLION)
    for job in (small, smaller):
        machines.takes(job, 2 * GIB)
    one, two, three, four = (machines.worker(name) for name in ("one", "two", "three", "four"))
    assert machines.claim(one) == large["recipe_id"]
    # The other large one is passed by, and both small ones fit: 28 + 2 + 2.
    assert machines.claim(two) == small["recipe_id"]
    assert machines.claim(three) == smaller["recipe_id"]
    assert machines.claim(four) is None
    assert machines.claim(machines.worker("other", "there")) == larger["recipe_id"]
    machines.release("other", larger["recipe_id"])
    machines.finish(two, small)
    assert machines.claim(four) is None
    machines.lose(one)
    assert machines.claim(four) in ids(large, larger)


def test_claims_at_once_do_not_overfill_a_machine(machines, many):
    jobs = many(6)
    for job in jobs:
        machines.takes(job, 10 * GIB)
    workers = [machines.worker(f"worker-{number}") for number in range(6)]
    recipe_ids = at_once(*(lambda number=number: machines.claim(workers[number]) for number in range(6)))
    claimed_ids = [recipe_id for recipe_id in recipe_ids if recipe_id is not None]
    assert len(claimed_ids) == len(set(claimed_ids)) == 3


def test_what_waited_long_is_not_passed_by_for_ever(machines, many, monkeypatch):
    small, large, later = many(3)
    machines.takes(large, SEVEN_BILLION)
    for job in (small, later):
        machines.takes(job, 8 * GIB)
    one, two = machines.worker("one"), machines.worker("two")
    assert machines.claim(one) == small["recipe_id"]
    monkeypatch.setattr(queue, "OVERDUE", timedelta(0))
    assert machines.claim(two) is None
    machines.finish(one, small)
    assert machines.claim(two) == large["recipe_id"]
    assert machines.claim(one) is None


def test_over_every_machine_s_memory_is_refused_early(app, machines, many):
    large, small = many(2)
    machines.takes(large, SEVEN_BILLION)
    machines.worker("big", "big", 16 * GIB)
    worker = machines.worker("one", "little", 8 * GIB)
    machines.takes(small, 9 * GIB)
    # It fits the other machine, so it waits for that.
    assert machines.claim(worker) is None
    view = app.get(f"/v1/jobs/{large['id']}").json()
    assert (view["state"], view["error"]["code"]) == ("failed", "compile-too-large")
    assert "MOBIZO_COMPILE_BUDGET_BYTES" in view["error"]["detail"]
    assert f"{16 * GIB:,}" in view["error"]["detail"]
    assert machines.claim("big") == small["recipe_id"]


def test_an_estimate_that_nobody_limited_runs_alone(machines, many):
    large, small = many(2)
    machines.takes(large, SEVEN_BILLION)
    one, two = machines.worker("one", memory=16 * GIB, limited=False), machines.worker("two", memory=None)
    assert machines.claim(one) == large["recipe_id"]
    assert machines.claim(two) is None
    machines.finish(one, large)
    assert machines.claim(two) == small["recipe_id"]


def test_a_crash_puts_the_next_try_off_twice_as_long_each_time(app, machines, monkeypatch):
    monkeypatch.setattr("server.tasks.queue.FIRST_BACKOFF", timedelta(seconds=100))
    machines.settings = machines.settings.model_copy(update={"compile_attempts": 4})
    job = app.submit()
    worker = machines.worker("one")
    for wait in (100, 200, 400):
        assert machines.claim(worker) == job["recipe_id"]
        machines.fail(worker, job["recipe_id"], CompilerCrashed("died"))
        view = app.get(f"/v1/jobs/{job['id']}").json()
        assert view["state"] == "queued"
        assert f"it crashed and is tried again in {wait} s" in view["progress"]["why"]
    assert machines.claim(worker) == job["recipe_id"]
    machines.fail(worker, job["recipe_id"], CompilerCrashed("died for good"))
    assert app.get(f"/v1/jobs/{job['id']}").json()["error"]["detail"] == "died for good"
    assert app.submit()["state"] == "queued"
    assert machines.claim(worker) == job["recipe_id"]
