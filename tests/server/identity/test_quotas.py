"""A tenant may have a bounded number of everything, and what one tenant has takes nothing from another."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from server.identity.quotas import Quota, QuotaService
from server.jobs import service
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


def test_progress_events_of_a_job_are_bounded(app, device, lease, monkeypatch):
    job = app.get("/v1/jobs").json()["items"][0]["id"]
    monkeypatch.setattr(service, "MAX_EVENTS", 6)
    for step in range(10):
        beat = {"phase": "training", "step": step, "steps": 100, "loss": 0.5}
        assert device.post(f"/v1/leases/{lease['id']}/heartbeat", json=beat).status_code == 200
    view = app.get(f"/v1/jobs/{job}").json()
    assert view["progress"]["step"] == 9
    app.post(f"/v1/jobs/{job}/cancel")
    events = app.get(f"/v1/jobs/{job}/events").text
    assert events.count("event: progress") <= 6
    assert '"state":"cancelled"' in events.rpartition("event: job")[2]
