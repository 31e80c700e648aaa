"""A home of the release before, whose queue had claims with leases and no DBOS: nothing that waited or ran is lost."""

import pytest
from alembic import command
from sqlalchemy import text

from server.database.schema import migrating
from server.schema import upgrade
from server.tasks.repository import TaskState
from server.worker import create_worker
from tests.server.homes import drain, turns

BEFORE = "0003"


def as_before(home):
    """Takes a home's queue back to the release before, as its worker left it when it was killed."""
    with migrating(home.database.engine) as config:
        command.downgrade(config, BEFORE)
    assert list(turns(home.database)) != []  # takes them


@pytest.mark.both_databases
def test_waiting_and_running_tasks_of_the_release_before_are_done(fleet, home, app):
    ready = fleet.ready_job(app)
    waiting, other = (app.submit(adapter=f"waiting-{rank}", recipe={"rank": rank}) for rank in (3, 4))
    foreign = fleet.app("other").submit(adapter="foreign", recipe={"rank": 4})
    running = app.submit(adapter="running", recipe={"rank": 5}, priority=9)
    worker = create_worker(home.settings, home.database)
    worker.register()
    with home.database.writing() as session:
        claim = worker._queue(session).claim("compile", "default", 0)
    assert claim.subject == running["recipe_id"]
    as_before(home)
    with home.database.engine.execution_options(writes=True).begin() as connection:
        connection.execute(
            text("UPDATE tasks SET state = 'running', worker_id = :worker WHERE subject = :subject"),
            {"worker": worker.id, "subject": claim.subject},
        )
        # Its process is gone.
        connection.execute(text("UPDATE workers SET seen_at = '2026-01-01'"))
    upgrade(home.database.engine)
    assert home.task(running["recipe_id"]).state is TaskState.RUNNING
    again = create_worker(home.settings, home.database)
    again.register()
    drain(again)
    for job in (ready, waiting, other, running):
        assert app.get(f"/v1/jobs/{job['id']}").json()["state"] == "ready"
    assert fleet.app("other").get(f"/v1/jobs/{foreign['id']}").json()["state"] == "ready"
    assert home.task(running["recipe_id"]).attempts == 2
    assert list(turns(home.database)) == []
