"""Homes of releases before, whose queues were tables: nothing that waited or ran is lost."""

import pytest
from alembic import command
from sqlalchemy import text

from server.database.schema import migrating
from server.schema import upgrade
from server.worker import create_worker
from tests.server.homes import drain, waiting_tasks

UNFINISHED = (
    "INSERT INTO tasks (kind, subject, state, memory_bytes, attempts, worker_id) "
    "SELECT 'compile', recipe_id, CASE state WHEN 'compiling' THEN 'running' ELSE 'waiting' END, 0, "
    "CASE state WHEN 'compiling' THEN 1 ELSE 0 END, CASE state WHEN 'compiling' THEN 'dead' END "
    "FROM programs WHERE state IN ('pending', 'compiling')"
)
REQUESTS = (
    "INSERT INTO task_requests (task_number, requester, kind, tenant, priority, created_at) "
    "SELECT tasks.number, jobs.id, 'compile', jobs.tenant, 0, jobs.created_at FROM jobs "
    "JOIN tasks ON tasks.subject = jobs.recipe_id WHERE jobs.state IN ('queued', 'compiling')"
)


@pytest.mark.both_databases
@pytest.mark.parametrize("before", ["0003", "0015"], ids=["leases", "turns"])
def test_waiting_and_running_tasks_of_a_release_before_are_done(fleet, home, app, before):
    ready = fleet.ready_job(app)
    waiting, other = (app.submit(adapter=f"waiting-{rank}", recipe={"rank": rank}) for rank in (3, 4))
    foreign = fleet.app("other").submit(adapter="foreign", recipe={"rank": 4})
    running = app.submit(adapter="running", recipe={"rank": 5})
    with migrating(home.database.engine) as config:
        command.downgrade(config, before)
    assert list(waiting_tasks(home.database)) != []  # takes them
    with home.database.engine.execution_options(writes=True).begin() as connection:
        for table in ("programs", "jobs"):
            connection.execute(
                text(f"UPDATE {table} SET state = 'compiling' WHERE recipe_id = :recipe"),
                {"recipe": running["recipe_id"]},
            )
        long_ago = "'2026-01-01'"
        connection.execute(
            text(
                "INSERT INTO workers (id, pid, host, pid_space, started_at, seen_at, peak_rss_bytes, "
                f"compiler_peak_rss_bytes) VALUES ('dead', 1, '', '', {long_ago}, {long_ago}, 0, 0)"
            )
        )
        connection.execute(text(UNFINISHED))
        if before == "0015":
            connection.execute(text("UPDATE tasks SET claim_id = 'claim' WHERE state = 'running'"))
        connection.execute(text(REQUESTS))
    upgrade(home.database.engine)
    assert home.task(running["recipe_id"]).attempts == 1
    worker = create_worker(home.settings, home.database)
    worker.register()
    drain(worker)
    for job in (ready, waiting, other, running):
        assert app.get(f"/v1/jobs/{job['id']}").json()["state"] == "ready"
    assert fleet.app("other").get(f"/v1/jobs/{foreign['id']}").json()["state"] == "ready"
    assert list(waiting_tasks(home.database)) == []
