"""Progress of jobs that ended long ago is forgotten; that they ran, and what became of them, is not."""

from datetime import timedelta

import pytest
from sqlalchemy import select, update

from server.database.columns import utc_now
from server.jobs.leases.repository import Ending, JobLease, LeaseRepository
from server.jobs.repository import Job, JobEvent
from server.jobs.sweeps import BATCH, purge_events
from shared.job import JobState

DAYS = 3


def kinds(home, job_id):
    statement = select(JobEvent.kind).join(Job, Job.number == JobEvent.job_number).where(Job.id == job_id)
    return home.scalars(statement.order_by(JobEvent.position))


def age(home, *job_ids, days=DAYS + 1):
    home.change(Job, Job.id.in_(job_ids), updated_at=utc_now() - timedelta(days=days))


@pytest.fixture
def trained_job_id(fleet, app, device):
    """A job with progress that has succeeded."""
    job = fleet.ready_job(app)
    lease = device.lease()
    for step in (1, 2):
        body = {"phase": "training", "step": step, "steps": 3}
        assert device.post(f"/v1/leases/{lease['id']}/heartbeat", json=body).status_code == 200
    device.finish(lease)
    return job["id"]


def test_progress_goes_and_what_became_of_the_job_stays(home, app, trained_job_id):
    before = app.get(f"/v1/jobs/{trained_job_id}").json()
    assert kinds(home, trained_job_id).count("progress") == 2
    age(home, trained_job_id)
    assert purge_events(home.database, DAYS) == 1
    assert kinds(home, trained_job_id) == ["job"] * 5
    after = app.get(f"/v1/jobs/{trained_job_id}").json()
    assert {name for name in before if before[name] != after[name]} == {"updated_at"}  # which the test has set
    assert purge_events(home.database, DAYS) == 0


@pytest.mark.both_databases
def test_leases_go_and_still_count(home, device, trained_job_id):
    def counts():
        with home.database.reading() as session:
            return LeaseRepository(session).counts()

    before = counts()
    assert before[0][Ending.COMPLETED] == 1
    age(home, trained_job_id)
    assert purge_events(home.database, DAYS) == 1
    assert home.scalars(select(JobLease)) == []
    assert counts() == before


def test_the_stream_of_a_thinned_job_ends(home, app, trained_job_id):
    age(home, trained_job_id)
    purge_events(home.database, DAYS)
    with app.stream("GET", f"/v1/jobs/{trained_job_id}/events") as response:
        ids = [line.removeprefix("id: ") for line in response.iter_lines() if line.startswith("id: ")]
    assert ids == ["1", "2", "3", "4", "7"]


def test_young_jobs_and_open_ones_keep_everything(home, fleet, app, device, trained_job_id):
    age(home, trained_job_id, days=DAYS - 1)
    app.submit()
    lease = device.lease()
    progress = {"phase": "training", "step": 1, "steps": 3}
    assert device.post(f"/v1/leases/{lease['id']}/heartbeat", json=progress).status_code == 200
    age(home, lease["job"]["id"])
    assert purge_events(home.database, DAYS) == 0
    assert "progress" in kinds(home, trained_job_id)
    assert "progress" in kinds(home, lease["job"]["id"])


@pytest.mark.both_databases
def test_more_than_one_transaction_takes(home, app, trained_job_id):
    with home.database.writing() as session:
        job = session.scalars(select(Job).where(Job.id == trained_job_id)).one()
        values = {column.name: getattr(job, column.name) for column in Job.__table__.columns if column.name != "number"}
        for number in range(BATCH + 1):
            session.add(Job(**(values | {"id": f"job_{number}", "state": JobState.FAILED})))
        session.flush()
        session.execute(update(Job).values(updated_at=utc_now() - timedelta(days=DAYS + 1)))
    assert purge_events(home.database, DAYS) == BATCH + 2


def test_events_are_purged_unless_they_are_kept_for_ever(home, trained_job_id):
    age(home, trained_job_id)
    purge_events(home.database, 0)
    assert "progress" in kinds(home, trained_job_id)
    purge_events(home.database, DAYS)
    assert "progress" not in kinds(home, trained_job_id)
