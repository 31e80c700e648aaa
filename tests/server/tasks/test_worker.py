"""Real worker processes over DBOS on both databases: compiled once, whatever dies."""

from functools import partial

import pytest
from sqlalchemy import select

from server.jobs.repository import JobEvent
from server.programs.service import Program
from server.tasks.repository import WorkerProcess
from server.worker import create_worker
from tests.server.homes import alive, at_once, drain, eventually

PATIENCE = 60


def workspaces(home):
    return list((home.settings.artifacts_path / "staging").iterdir())


@pytest.mark.both_databases
def test_asked_for_many_times_at_once_compiled_once(fleet, home, app, start_worker, state):
    start_worker()
    start_worker()
    actors = [fleet.app("default" if number % 2 else "other") for number in range(6)]
    jobs = at_once(*(partial(actor.submit, adapter=f"a{number}") for number, actor in enumerate(actors)))
    for actor, job in zip(actors, jobs, strict=True):
        eventually(lambda actor=actor, job=job: actor.get(f"/v1/jobs/{job['id']}").json()["state"] == "ready")
    assert len(home.starts()) == 1
    assert home.scalar(select(Program)).signed.manifest.version == 1
    # Another recipe of the same base adds its program only: weights and tokenizer are shared.
    before = home.stored_files()
    other = app.submit(adapter="other", recipe={"rank": 3})
    eventually(lambda: state(other) == "ready")
    assert len(home.starts()) == 2
    assert len(home.stored_files()) == len(before) + 1
    eventually(lambda: not workspaces(home))


@pytest.mark.both_databases
def test_a_worker_killed_in_the_middle(home, app, start_worker, state):
    home.behave(hang=True)
    first = start_worker(compile_lease_seconds=2)
    job = app.submit()
    compiler = eventually(home.starts)[0]
    assert state(job) == "compiling"
    first.kill()
    eventually(lambda: not alive(compiler))
    # As if it had run on another machine: only its silence tells that it is dead.
    home.change(WorkerProcess, pid_space="elsewhere")
    home.behave()
    start_worker(compile_lease_seconds=2)
    eventually(lambda: state(job) == "ready")
    assert len(home.starts()) == 2


@pytest.mark.both_databases(slow=True)
def test_another_worker_on_the_machine_takes_over_at_once(home, app, start_worker, state):
    patient = {"compile_lease_seconds": 600.0}
    home.behave(hang=True)
    first = start_worker(**patient)
    job = app.submit()
    compiler = eventually(home.starts)[0]
    second = start_worker(**patient)
    first.kill()
    eventually(lambda: not alive(compiler))
    eventually(lambda: len(home.starts()) == 2)
    home.behave()
    # The same again, and now a worker that has just started.
    second.kill()
    start_worker(**patient)
    eventually(lambda: state(job) == "ready")
    assert len(home.starts()) == 3
    program = home.scalar(select(Program))
    assert program.signed.manifest.version == 1
    assert home.task(program.recipe_id) is None


@pytest.mark.both_databases(slow=True)
def test_cancelled_jobs_stop_the_compiler(home, app, start_worker, state):
    home.behave(hang=True)
    start_worker()
    job = app.submit()
    compiler = eventually(home.starts)[0]
    app.post(f"/v1/jobs/{job['id']}/cancel")
    eventually(lambda: not alive(compiler))
    home.behave()
    again = app.submit()
    eventually(lambda: state(again) == "ready")
    assert state(job) == "cancelled"


@pytest.mark.both_databases
def test_a_compile_tells_how_it_goes_and_its_worker_may_be_asked_to_stop(home, app, start_worker, state):
    home.behave(hang=True)
    worker = start_worker()
    job = app.submit()
    compiler = eventually(home.starts)[0]
    view = eventually(lambda: (job_view := app.get(f"/v1/jobs/{job['id']}").json())["progress"] and job_view)
    assert view["state"] == "compiling"
    assert (view["progress"]["phase"], view["progress"]["why"]) == ("compiling", "reading the base model")
    home.behave()
    worker.terminate()
    worker.join(PATIENCE)
    assert worker.exitcode == 0
    assert not alive(compiler)
    view = app.get(f"/v1/jobs/{job['id']}").json()
    assert (view["state"], view["progress"]) == ("queued", None)
    assert workspaces(home) == []
    start_worker()
    eventually(lambda: state(job) == "ready")
    assert len(home.scalars(select(JobEvent).where(JobEvent.kind == "progress"))) in (1, 2)


def test_errors_crashes_and_tampering(home, app, state):
    worker = create_worker(home.settings, home.database)
    worker.register()
    refusal = {"code": "unsupported-model", "detail": "mixture of experts"}
    for behaviour, code, starts in (
        ({"error": refusal}, "unsupported-model", 1),
        ({"crash": True}, "compile-failed", 4),  # tried three times
        ({"tamper": True}, "untrusted", 5),
    ):
        home.behave(**behaviour)
        job = app.submit()
        drain(worker)
        assert state(job) == "failed"
        error = app.get(f"/v1/jobs/{job['id']}").json()["error"]
        assert error["code"] == code
        assert len(home.starts()) == starts
        assert error == refusal or behaviour.keys() != {"error"}
    home.behave()
    job = app.submit()
    drain(worker)
    assert state(job) == "ready"


def test_memory_is_reported(home, app, operator, start_worker, state):
    start_worker()
    home.behave(memory=200, error={"code": "x", "detail": "y"})
    job = app.submit()
    usage = eventually(
        lambda: (
            (server_usage := operator.get("/v1/server/usage").json())["compiler_peak_rss_bytes"] > 200 << 20
            and server_usage
        )
    )
    assert usage["peak_rss_bytes"] >= usage["compiler_peak_rss_bytes"]
    assert usage["worker_peak_rss_bytes"] > 1 << 20
    assert usage["server_peak_rss_bytes"] > 1 << 20
    app.post(f"/v1/jobs/{job['id']}/cancel")
