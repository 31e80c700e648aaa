"""Jobs that repeat: exactly one follows each, from `main`, until the series is cancelled or cannot go on."""

from datetime import timedelta

import pytest

from server.database.columns import utc_now
from server.jobs.repository import Job
from server.jobs.service import JobLifecycle
from server.jobs.sweeps import continue_series
from shared.job import PRIVACY_LIMIT_REACHED, TOO_FEW_NEW_RECORDS, Repeat
from tests.server.actors import job_request

WEEKLY = {"repeat": {"every": "7d", "min_new_records": 20}}


@pytest.fixture
def watch(home):
    """Lets all waiting series be due, and runs the sweep."""

    def watch(due=True):
        if due:
            home.change(Job, Job.repeat_at.is_not(None), repeat_at=utc_now() - timedelta(seconds=1))
        continue_series(home.database, home.artifacts)
        home.compile()

    return watch


def jobs(app):
    """The tenant's jobs, oldest first."""
    return [app.get(f"/v1/jobs/{job['id']}").json() for job in app.get("/v1/jobs").json()["items"][::-1]]


def fail(device, lease, code):
    body = {"code": code, "detail": "fewer than 20 new records"}
    assert device.post(f"/v1/leases/{lease['id']}/fail", json=body).status_code == 200


def test_each_end_is_followed_by_one_job_from_main_when_it_is_due(fleet, app, device, watch):
    first = fleet.ready_job(app, **WEEKLY)
    assert (first["series"], "next_at" in first) == (first["id"], False)
    device.finish(device.lease())
    main = app.get("/v1/adapters/alice-movies/versions/1").json()["revision"]
    watch(due=False)
    assert "next_at" in jobs(app)[0]
    for _ in range(2):
        watch()
    former, second = jobs(app)
    assert "next_at" not in former
    assert (second["series"], second["state"]) == (first["id"], "ready")
    assert second["request"] == first["request"] | {"start": {"adapter": "alice-movies", "revision": main}}
    lease = device.lease()
    assert lease["job"]["request"]["repeat"]["min_new_records"] == 20
    fail(device, lease, TOO_FEW_NEW_RECORDS)
    assert app.get(f"/v1/jobs/{second['id']}").json()["error"]["code"] == TOO_FEW_NEW_RECORDS
    watch()
    assert [job["series"] for job in jobs(app)] == [first["id"]] * 3
    third = device.lease()  # a device does not cool down for it
    device.finish(third, 0.25, tuned_accuracy=0.9)
    assert app.get("/v1/adapters/alice-movies/versions/2").json()["parent"]["version"] == 1


def test_without_an_approved_version_the_next_job_starts_as_the_first(fleet, app, device, watch):
    first = fleet.ready_job(app, **WEEKLY)
    fail(device, device.lease(), "diverged")
    watch()
    assert jobs(app)[1]["request"] == first["request"]
    device.finish(device.lease(), tuned_accuracy=0.1)  # held
    watch()
    assert jobs(app)[2]["request"] == first["request"]


@pytest.mark.both_databases
def test_a_failure_while_the_next_job_is_made_leaves_the_series_as_it_was(fleet, app, device, home, watch, monkeypatch):
    fleet.ready_job(app, **WEEKLY)
    device.finish(device.lease())

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(JobLifecycle, "begin", killed)
        with pytest.raises(KeyboardInterrupt):
            watch()
    assert len(jobs(app)) == 1
    watch()
    watch()
    assert len(jobs(app)) == 2


def test_one_cancellation_ends_the_series_at_any_time(fleet, app, device, watch):
    first = fleet.ready_job(app, **WEEKLY)
    device.finish(device.lease())
    watch()
    second = jobs(app)[1]
    cancelled = app.post(f"/v1/jobs/{first['id']}/cancel").json()
    assert (cancelled["id"], cancelled["state"], cancelled["series_end"]) == (
        second["id"],
        "cancelled",
        "it was cancelled",
    )
    other = fleet.ready_job(app, **WEEKLY)
    device.finish(device.lease(), tuned_accuracy=0.9)
    between = app.post(f"/v1/jobs/{other['id']}/cancel").json()
    assert (between["state"], between["series_end"], "next_at" in between) == ("succeeded", "it was cancelled", False)
    watch()
    assert len(jobs(app)) == 3


@pytest.mark.parametrize(
    ("repeat", "code", "reason"),
    [
        ({"until": "2026-01-01T00:00:00Z"}, "diverged", "it repeats until 2026-01-01"),
        ({}, PRIVACY_LIMIT_REACHED, "fewer than 20 new records"),
    ],
)
def test_a_series_ends_at_its_time_and_by_the_owner(fleet, app, device, watch, repeat, code, reason):
    first = fleet.ready_job(app, repeat=WEEKLY["repeat"] | repeat)
    fail(device, device.lease(), code)
    assert app.get(f"/v1/jobs/{first['id']}").json()["series_end"].startswith(reason)
    watch()
    assert len(jobs(app)) == 1


def test_a_series_ends_with_its_device_and_with_the_budget(fleet, app, operator, device, home, watch):
    assert operator.put("/v1/users/alice/privacy", json={"epsilon": 3.0}).status_code == 200
    private = {"privacy": {"clip": 0.2, "noise_multiplier": 1.0, "sampling_rate": 0.02}, "training": {"steps": 150}}
    fleet.ready_job(app, **WEEKLY, **private, device=device.device_id)
    ended, rounds = [], 0
    while not ended:
        lease = device.lease()
        device.finish(lease, **dict.fromkeys(("zero_shot_accuracy", "tuned_accuracy", "train_examples")))
        rounds += 1
        watch()
        ended = [job["series_end"] for job in jobs(app) if "series_end" in job]
        assert rounds < 20
    assert rounds > 1
    assert "budget" in ended[0]
    assert len(jobs(app)) == rounds
    other = fleet.device(name="other", users=("bob",))
    fleet.ready_job(app, user="bob", adapter="bobs", device=other.device_id, **WEEKLY)
    other.finish(other.lease())
    home.revoke_device(other.device_id)
    watch()
    assert jobs(app)[-1]["series_end"] == f"device: no device {other.device_id!r} is enrolled here"


@pytest.mark.parametrize("every", ["0d", "7", "7w", "1000d", "-1d"])
def test_other_times_and_repeat_in_a_cohort_are_refused(app, operator, problem, every):
    body = job_request(repeat={"every": every})
    assert problem(app.post("/v1/jobs", json=body), 422, "invalid-request")["errors"][0]["field"] == "repeat.every"
    cohort = {"name": "readers", **WEEKLY}
    fields = problem(operator.post("/v1/cohorts", json=cohort), 422, "invalid-request")["errors"]
    assert "repeat" in [error["field"] for error in fields]


def test_intervals_are_hours_and_days():
    now = utc_now()
    assert Repeat(every="12h").after(now) - now == timedelta(hours=12)
    assert Repeat(every="7d").after(now) - now == timedelta(days=7)
