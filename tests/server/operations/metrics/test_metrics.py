"""What a scrape tells, against what was done; by the library's own parser."""

import threading
from dataclasses import replace
from datetime import timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.database.columns import new_id, utc_now
from server.database.database import Database
from server.identity.devices.repository import Device
from server.jobs.repository import Job
from server.operations.metrics import Exposition
from server.programs.service import Program, ProgramState
from server.settings import Delivery
from server.tasks.repository import WorkerProcess
from server.web.middleware import Meters
from tests.server.actors import adapter_bytes
from tests.server.homes import eventually

PATIENCE = 60
COUNT = "mobizo_http_request_seconds_count"


def samples(text):
    """Every sample: {(name, label values in the labels' order): value}."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def scrape(fleet, standing):
    """Everything that the server tells now: nothing kept of an earlier scrape."""

    def scrape():
        state = standing[0].state.mobizo
        return samples(Exposition(state.meters, state.database).text().decode())

    return scrape


@pytest.mark.both_databases(slow=True)
def test_the_life_of_jobs(fleet, home, scrape):
    app, other = fleet.app(), fleet.app("other")
    phone, tablet = fleet.device(name="phone"), fleet.device(name="tablet")
    fleet.ready_job(app)
    other.submit(adapter="theirs")
    app.submit(adapter="new", recipe={"rank": 3})
    metrics = scrape()
    assert metrics["mobizo_jobs", "training"] == metrics["mobizo_leases_reassigned_total",] == 0
    assert metrics["mobizo_database_up",] == 1
    assert metrics["process_resident_memory_bytes",] > 1 << 20
    assert metrics["mobizo_jobs", "ready"] == 2
    assert metrics["mobizo_jobs", "queued"] == 1
    assert metrics["mobizo_tenants",] == 2
    assert (metrics["mobizo_program_requests_total", "hit"], metrics["mobizo_program_requests_total", "miss"]) == (
        1,
        2,
    )
    assert (metrics["mobizo_programs", "ready"], metrics["mobizo_programs", "pending"]) == (1, 1)
    lease = phone.lease()
    metrics = scrape()
    assert metrics["mobizo_leases_live",] == 1
    assert metrics["mobizo_jobs", "training"] == 1
    home.let_run_out(lease)
    again = tablet.lease()
    assert again["job"]["id"] == lease["job"]["id"]
    tablet.finish(again)
    metrics = scrape()
    assert metrics["mobizo_leases_live",] == 0
    assert metrics["mobizo_leases_ended_total", "expired"] == 1
    assert metrics["mobizo_leases_ended_total", "completed"] == 1
    assert metrics["mobizo_leases_reassigned_total",] == 1
    assert metrics["mobizo_jobs", "succeeded"] == 1


@pytest.mark.both_databases(slow=True)
def test_how_long_the_oldest_waits(fleet, home, app, scrape):
    first, second = app.submit(), app.submit(adapter="other", recipe={"rank": 3})
    for job, hours in ((first, 2), (second, 1)):
        home.change(Job, Job.id == job["id"], updated_at=utc_now() - timedelta(hours=hours))
    assert scrape()["mobizo_jobs_oldest_seconds", "queued"] == pytest.approx(7200, abs=PATIENCE)
    app.post(f"/v1/jobs/{first['id']}/cancel")
    assert scrape()["mobizo_jobs_oldest_seconds", "queued"] == pytest.approx(3600, abs=PATIENCE)


@pytest.mark.both_databases(slow=True)
def test_devices_by_when_they_were_seen(fleet, home, scrape):
    for name, ago in (("a", 1), ("b", 30), ("c", 60 * 5), ("d", 60 * 50)):
        device_id = fleet.device(name=name).device_id
        home.change(Device, Device.id == device_id, last_seen_at=utc_now() - timedelta(minutes=ago))
    metrics = scrape()
    assert metrics["mobizo_devices_enrolled",] == 4
    assert [metrics["mobizo_devices_seen", within] for within in ("5m", "1h", "1d")] == [1, 2, 3]


def test_workers_that_live(home, scrape):
    now = utc_now()
    with home.database.writing() as session:
        for seen_at, own, compiler in ((now, 100, 7000), (now, 200, 10), (now - timedelta(hours=1), 9000, 90000)):
            session.add(
                WorkerProcess(
                    id=new_id("worker"),
                    pid=1,
                    started_at=seen_at,
                    seen_at=seen_at,
                    peak_rss_bytes=own,
                    compiler_peak_rss_bytes=compiler,
                )
            )
    metrics = scrape()
    assert metrics["mobizo_workers_alive",] == 2
    assert metrics["mobizo_workers_peak_rss_bytes", "worker"] == 200
    assert metrics["mobizo_workers_peak_rss_bytes", "compiler"] == 7000


@pytest.mark.both_databases(slow=True)
def test_how_long_compiles_took(fleet, home, app, scrape):
    began = utc_now() - timedelta(hours=1)
    fleet.ready_job(app)
    bad = app.submit(adapter="bad", recipe={"rank": 3})
    ready = Program.state == ProgramState.READY
    home.change(Program, ready, started_at=began, ready_at=began + timedelta(seconds=42))
    home.change(Program, Program.recipe_id == bad["recipe_id"], started_at=began, state=ProgramState.FAILED)
    home.change(Job, Job.id == bad["id"], state="failed", updated_at=began + timedelta(seconds=7))
    metrics = scrape()
    name = "mobizo_compile_seconds"
    assert [metrics[f"{name}_bucket", limit, "ready"] for limit in ("30.0", "60.0", "+Inf")] == [0, 1, 1]
    assert [metrics[f"{name}_bucket", limit, "failed"] for limit in ("5.0", "15.0", "+Inf")] == [0, 1, 1]
    assert (metrics[f"{name}_sum", "ready"], metrics[f"{name}_sum", "failed"]) == (42, 7)
    assert metrics[f"{name}_count", "ready"] == 1


def test_requests_by_template_and_never_by_name(fleet, app, scrape, lease, device):
    before = scrape()[COUNT, "GET", "/v1/jobs/{job_id}", "2xx"]
    for _ in range(3):
        app.get(f"/v1/jobs/{lease['job']['id']}")
    app.get("/v1/jobs/job_that_is_not")
    app.get("/nothing/here")
    app.request("BREW", "/v1/jobs")
    metrics = scrape()
    assert metrics[COUNT, "GET", "/v1/jobs/{job_id}", "2xx"] == before + 3
    assert metrics[COUNT, "GET", "/v1/jobs/{job_id}", "4xx"] == 1
    assert metrics[COUNT, "GET", "none", "4xx"] == 1
    assert metrics[COUNT, "other", "/v1/jobs", "4xx"] == 1
    assert lease["id"] not in str(metrics)


def test_bytes_both_ways(fleet, scrape, lease, device):
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    device.upload(lease, data)
    (file,) = [file for file in lease["manifest"]["manifest"]["files"] if file["role"] == "weights"]
    assert len(device.get(f"/v1/files/{file['sha256']}").content) == file["size"]
    device.get(f"/v1/files/{file['sha256']}", headers={"Range": "bytes=0-99"})
    metrics = scrape()
    assert metrics["mobizo_http_received_bytes_total", "/v1/leases/{lease_id}/adapter"] == len(data)
    assert metrics["mobizo_http_sent_bytes_total", "/v1/files/{sha256}"] == file["size"] + 100


def test_files_that_nginx_sends(standing, scrape, lease, device):
    app, _ = standing
    app.state.mobizo = replace(
        app.state.mobizo, settings=app.state.mobizo.settings.model_copy(update={"delivery": Delivery.ACCEL})
    )
    (file,) = [file for file in lease["manifest"]["manifest"]["files"] if file["role"] == "weights"]
    answer = device.get(f"/v1/files/{file['sha256']}", headers={"X-Sendfile-Type": "X-Accel-Redirect"})
    assert answer.headers["x-accel-redirect"]
    metrics = scrape()
    assert metrics["mobizo_files_handed_over_bytes_total", "accel"] == file["size"]
    assert ("mobizo_http_sent_bytes_total", "/v1/files/{sha256}") not in metrics


def test_who_waits(fleet, app, device, scrape):
    waiting = threading.Thread(target=device.lease, kwargs={"wait_seconds": 30})
    waiting.start()
    eventually(lambda: scrape()["mobizo_polls_open",] == 1)
    job = app.submit()
    with app.stream("GET", f"/v1/jobs/{job['id']}/events"):
        eventually(lambda: scrape()["mobizo_event_streams_open",] == 1)
        assert scrape()["mobizo_http_requests_running",] == 2
        fleet.home.compile()
        waiting.join()
        app.post(f"/v1/jobs/{job['id']}/cancel")
        eventually(lambda: scrape()["mobizo_event_streams_open",] == 0)
    eventually(lambda: scrape()["mobizo_polls_open",] == 0)


def test_a_database_that_is_away(tmp_path):
    missing_database = Database(f"sqlite:///{tmp_path}/no/such/directory/db")
    metrics = samples(Exposition(Meters(), missing_database).text().decode())
    missing_database.close()
    assert metrics["mobizo_database_up",] == 0
    assert ("mobizo_jobs", "queued") not in metrics
    assert metrics["mobizo_polls_open",] == 0
