"""A tenant may have a bounded number of everything, and what one tenant has takes nothing from another."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select, text

from server.database.columns import utc_now
from server.identity.quotas import DEFAULTS, Quota, QuotaService
from server.jobs.repository import LATEST_OF_SERIES, SUBMITTED, Job, JobRepository
from server.jobs.sweeps import continue_series
from server.operations.tenant_usage import tenant_usage
from server.registry.purge import purge_adapters
from tests.server.actors import adapter_bytes, job_request, result

COHORT = {"base": "tiny", "task": "sst2", "dataset": "movies", "recipe": {"rank": 2, "sequence_length": 16}}


@pytest.fixture
def limit(home):
    """Sets a quota of a tenant."""

    def set_limit(quota, most, tenant="default"):
        with home.database.writing() as session:
            QuotaService(session).set_limit(tenant, quota, most)

    return set_limit


def refused(problem, response, quota, limit):
    document = problem(response, 409, "quota-exceeded")
    assert (document["quota"], document["limit"]) == (quota, limit)


@pytest.mark.both_databases
def test_waiting_jobs(fleet, app, problem, limit):
    limit(Quota.WAITING_JOBS, 2)
    first = app.submit()
    app.submit()
    refused(problem, app.post("/v1/jobs", json=job_request()), "waiting_jobs", 2)
    assert len(app.get("/v1/jobs").json()["items"]) == 2
    fleet.app("other").submit()
    assert app.post(f"/v1/jobs/{first['id']}/cancel").status_code == 200
    app.submit()


@pytest.mark.both_databases
def test_waiting_jobs_that_are_submitted_at_once(app, limit):
    limit(Quota.WAITING_JOBS, 3)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: app.post("/v1/jobs", json=job_request()).status_code, range(12)))
    assert sorted(answers) == [202] * 3 + [409] * 9


def test_tokens_and_one_time_tokens(operator, problem, limit):
    tokens = len(operator.get("/v1/tokens").json()["items"])
    limit(Quota.TOKENS, tokens + 2)
    made = operator.post("/v1/tokens", json={"role": "app", "name": "one"})
    assert made.status_code == 201
    assert operator.post("/v1/enrollments", json={"users": ["alice"]}).status_code == 201
    refused(problem, operator.post("/v1/tokens", json={"role": "app", "name": "x"}), "tokens", tokens + 2)
    refused(problem, operator.post("/v1/enrollments", json={"users": ["alice"]}), "tokens", tokens + 2)
    operator.delete(f"/v1/tokens/{made.json()['view']['id']}")
    assert operator.post("/v1/tokens", json={"role": "app", "name": "x"}).status_code == 201


def test_devices(fleet, operator, problem, limit):
    fleet.device()
    limit(Quota.DEVICES, 1)
    with pytest.raises(AssertionError, match="quota-exceeded"):
        fleet.device(name="another")
    fleet.device(tenant="other")
    device_id = operator.get("/v1/devices").json()["items"][0]["id"]
    operator.post(f"/v1/devices/{device_id}/revoke")
    fleet.device(name="another")


def test_cohorts(operator, problem, limit):
    limit(Quota.COHORTS, 1)
    assert operator.post("/v1/cohorts", json=COHORT | {"name": "first"}).status_code == 201
    refused(problem, operator.post("/v1/cohorts", json=COHORT | {"name": "second"}), "cohorts", 1)


@pytest.mark.both_databases
def test_jobs_that_are_cancelled_at_once_are_bounded_by_day(home, fleet, app, problem, limit):
    """Each stored job takes tens of kilobytes, and a cancelled one waits no more."""
    limit(Quota.JOBS_PER_DAY, 2)
    for _ in range(2):
        assert app.post(f"/v1/jobs/{app.submit()['id']}/cancel").status_code == 200
    refused(problem, app.post("/v1/jobs", json=job_request()), "jobs_per_day", 2)
    fleet.app("other").submit()
    home.change(Job, Job.tenant == "default", created_at=utc_now() - timedelta(hours=25))
    app.submit()
    with home.database.reading() as session:
        used = {usage.quota: usage.used for usage in tenant_usage(session, "default")}
    assert used[Quota.JOBS_PER_DAY] == 1


@pytest.mark.both_databases
def test_series_that_have_not_ended(home, fleet, app, device, problem, limit):
    """A series counts once while it waits, trains, or waits for its next job; and no longer once it has ended."""
    weekly = {"repeat": {"every": "7d"}}
    limit(Quota.SERIES, 2)
    first = fleet.ready_job(app, **weekly)
    second = app.submit(adapter="alice-mail", **weekly)

    def another():
        return app.post("/v1/jobs", json=job_request(adapter="alice-notes", **weekly))

    refused(problem, another(), "series", 2)
    app.submit(adapter="alice-notes")  # a job that does not repeat is none
    assert app.post(f"/v1/jobs/{second['id']}/cancel").status_code == 200
    assert app.post(f"/v1/jobs/{second['id']}/cancel").status_code == 200
    second = app.submit(adapter="alice-mail", **weekly)
    device.finish(device.lease())
    assert "next_at" in app.get(f"/v1/jobs/{first['id']}").json()
    refused(problem, another(), "series", 2)
    # A smaller quota ends no series: the next job of the first one is created.
    limit(Quota.SERIES, 0)
    home.change(Job, Job.repeat_at.is_not(None), repeat_at=utc_now() - timedelta(seconds=1))
    continue_series(home.database, home.artifacts)
    with home.database.reading() as session:
        assert JobRepository(session).count_series("default") == 2
        assert JobRepository(session).count_series("other") == 0
    limit(Quota.SERIES, 2)
    refused(problem, another(), "series", 2)
    assert app.post(f"/v1/jobs/{first['id']}/cancel").status_code == 200
    assert another().status_code == 202


@pytest.mark.both_databases
def test_series_that_are_submitted_at_once(app, limit):
    limit(Quota.SERIES, 3)
    with ThreadPoolExecutor(8) as pool:
        bodies = [job_request(repeat={"every": "7d"}) for _ in range(12)]
        answers = list(pool.map(lambda body: app.post("/v1/jobs", json=body).status_code, bodies))
    assert sorted(answers) == [202] * 3 + [409] * 9


def test_stored_bytes(home, fleet, app, device, problem, limit):
    fleet.ready_job(app)
    lease = device.lease()
    device.finish(lease)
    size = len(adapter_bytes(lease["manifest"]["manifest"]["size"]))
    with home.database.reading() as session:
        assert QuotaService(session).stored_bytes("default") == size
    limit(Quota.STORED_BYTES, 2 * size - 1)
    fleet.ready_job(app)
    lease = device.lease()
    assert device.upload(lease).status_code == 200
    done = {"adapter_sha256": device.upload(lease).json()["sha256"], "result": result()}
    refused(problem, device.post(f"/v1/leases/{lease['id']}/complete", json=done), "stored_bytes", 2 * size - 1)
    limit(Quota.STORED_BYTES, size)
    refused(problem, device.upload(lease), "stored_bytes", size)
    app.delete("/v1/adapters/alice-movies")
    assert purge_adapters(home.database, timedelta(0)) == 1
    with home.database.reading() as session:
        assert QuotaService(session).stored_bytes("default") == 0


def test_progress_events_of_a_job_are_bounded(home, fleet, app, device, limit):
    limit(Quota.JOB_EVENTS, 6)
    job = fleet.ready_job(app)["id"]
    lease = device.lease()
    for step in range(10):
        beat = {"phase": "training", "step": step, "steps": 100, "loss": 0.5}
        assert device.post(f"/v1/leases/{lease['id']}/heartbeat", json=beat).status_code == 200
    view = app.get(f"/v1/jobs/{job}").json()
    assert view["progress"]["step"] == 9
    with home.database.reading() as session:
        usages = {usage.quota: usage for usage in tenant_usage(session, "default")}
    assert (usages[Quota.JOB_EVENTS].used, usages[Quota.JOB_EVENTS].limit) == (6, 6)
    app.post(f"/v1/jobs/{job}/cancel")
    events = app.get(f"/v1/jobs/{job}/events").text
    assert events.count("event: progress") <= 6
    assert '"state":"cancelled"' in events.rpartition("event: job")[2]


@pytest.mark.both_databases
@pytest.mark.parametrize(
    ("index", "conditions"),
    [("ix_jobs_series", [LATEST_OF_SERIES]), ("ix_jobs_submitted", [Job.created_at > utc_now(), SUBMITTED])],
)
def test_counting_jobs_reads_one_index_alone(home, index, conditions):
    with home.database.reading() as session:
        jobs = select(func.count()).select_from(Job).where(Job.tenant == "default", *conditions)
        sql = str(jobs.compile(session.get_bind(), compile_kwargs={"literal_binds": True}))
        if session.get_bind().dialect.name == "sqlite":
            (row,) = session.execute(text(f"EXPLAIN QUERY PLAN {sql}"))
            assert f"COVERING INDEX {index}" in row.detail
        else:
            session.execute(text("SET LOCAL enable_seqscan = off"))
            session.execute(text("SET LOCAL enable_bitmapscan = off"))
            assert f"Index Only Scan using {index}" in str(session.execute(text(f"EXPLAIN {sql}")).all())


def test_the_documentation_names_every_quota():
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text("utf-8")
    table = page.partition("## Quotas")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(DEFAULTS) == set(Quota)
