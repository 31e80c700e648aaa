"""What older releases left in a database is there after an upgrade, and goes on.

states/*.sql: every row that a server of that revision wrote while jobs of two tenants went every way they can go; its
own output, but for the dates. The first line has the tokens.
"""

import itertools
import json
from pathlib import Path

import pytest
from sqlalchemy import text

from server.adapters.backlog import sign_backlog
from server.db.database import Database
from server.db.schema import upgrade
from shared.job import JobState
from tests.server.conftest import BOTH, copy_home, home_of

DATABASES = BOTH
STATES = Path(__file__).parent / "states"


class State:
    """The database of an older release."""

    def __init__(self, path):
        head, *self.statements = path.read_text().splitlines()
        self.revision = path.stem
        self.tokens = json.loads(head.removeprefix("-- "))

    def load(self, url):
        """Writes it into an empty database, and the rows that it then has by table."""
        database = Database(url)
        upgrade(database.engine, self.revision)
        with database.engine.execution_options(writes=True).begin() as connection:
            for statement in self.statements:
                connection.exec_driver_sql(statement.replace("%", "%%") if "postgres" in url else statement)
            if connection.dialect.name == "postgresql":
                _count_on(connection)
        with database.reading() as session:
            found = {
                name: [dict(row) for row in session.execute(text(f'SELECT * FROM "{name}"')).mappings()]
                for name in ("jobs", "job_events", "devices", "adapter_versions", "leases")
            }
        database.close()
        return found


def _count_on(connection):
    """Numbers go on after those of the rows, as they do by themselves where rows were not written with theirs."""
    numbered = (
        "SELECT table_name FROM information_schema.columns WHERE column_name = 'number' AND table_schema = 'public'"
    )
    for table in connection.execute(text(numbered)).scalars().all():
        connection.execute(
            text(f"SELECT setval(pg_get_serial_sequence('{table}', 'number'), max(number)) FROM \"{table}\"")
        )


@pytest.fixture(params=sorted(path.stem for path in STATES.glob("*.sql")))
def state(request):
    return State(STATES / f"{request.param}.sql")


@pytest.fixture
def home(home_template, database_kind, empty_url, state, tmp_path):
    """A home that was upgraded from `state`; `home.old`: the rows before."""
    root = tmp_path / "server"
    settings = copy_home(home_template, root, empty_url)
    old = state.load(empty_url)
    database = Database(empty_url)
    upgrade(database.engine)
    sign_backlog(database, settings)  # as a worker does when it starts
    database.close()
    # Their keys are not ours: the agents of then sign nothing.
    settings = settings.model_copy(update={"signed_requests": "none"})
    with home_of(settings, root / "source") as found:
        found.old = old
        yield found


def covers(new, old):
    """Whether `new` says all that `old` does; it may say more."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(name in new and covers(new[name], old[name]) for name in old)
    return new == old


def everything(client, url):
    """All items of a list."""
    found, cursor = [], None
    while True:
        page = client.get(url, params={"cursor": cursor} if cursor else {}).json()
        found += page["items"]
        cursor = page["next"]
        if cursor is None:
            return found


def test_everything_is_told_as_it_was(fleet, home, state):
    apps = [fleet.actor(state.tokens[name]) for name in ("app", "acme")]
    jobs = {job["id"]: job for app in apps for job in everything(app, "/v1/jobs")}
    assert {job_id: job["state"] for job_id, job in jobs.items()} == {
        row["id"]: row["state"] for row in home.old["jobs"]
    }
    assert {job["state"] for job in jobs.values()} == set(JobState)
    for row in home.old["jobs"]:
        events = [event for event in home.old["job_events"] if event["job_number"] == row["number"]]
        last = max(events, key=lambda event: event["position"])
        if last["kind"] == "job":
            assert covers(jobs[row["id"]], json.loads(last["data"]))
    assert_events_again(apps[0], home)
    for row in home.old["adapter_versions"]:
        version = apps[0].get(f"/v1/adapters/alice-movies/versions/{row['version']}").json()
        assert (version["sha256"], version["job_id"], version["size"]) == (row["sha256"], row["job_id"], row["size"])
    assert apps[0].get("/v1/adapters/alice-movies").json()["versions"] == len(home.old["adapter_versions"])
    found = everything(fleet.actor(state.tokens["operator"]), "/v1/devices")
    assert {(device["id"], device["name"]) for device in found} == {
        (row["id"], row["name"]) for row in home.old["devices"] if row["tenant"] == "default"
    }


def assert_events_again(app, home):
    """The stream of a job that has ended tells what it told."""
    row = next(row for row in home.old["jobs"] if row["state"] == "succeeded")
    with app.stream("GET", f"/v1/jobs/{row['id']}/events") as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    old = [event for event in home.old["job_events"] if event["job_number"] == row["number"]]
    assert lines == [event["data"] for event in sorted(old, key=lambda event: event["position"])]


def test_training_goes_on(fleet, home, state):
    """A device gets the job that it had, although its time is over, and hands it in; then it gets those that wait."""
    app, tablet, phone = (fleet.actor(state.tokens[name]) for name in ("app", "tablet", "phone"))
    waiting = [row["id"] for row in home.old["jobs"] if row["state"] == "ready" and row["tenant"] == "default"]
    lease = tablet.lease("books")
    assert lease["id"] == next(row["id"] for row in home.old["leases"] if row["ending"] is None)
    assert tablet.finish(lease)["version"] == 1
    assert app.get(f"/v1/jobs/{lease['job']['id']}").json()["state"] == "succeeded"
    given = []
    for dataset in itertools.chain(["songs"], ["movies"] * 3, ["notes", "cats", "plays"]):
        lease = phone.lease(dataset, memory_bytes=2**40)
        if lease is not None:
            given.append(lease["job"]["id"])
            phone.finish(lease)
    assert sorted(given) == sorted(waiting)
    assert fleet.actor(state.tokens["robot"]).lease()["job"]["request"]["user"] == "hal"


def test_compilations_go_on_and_new_jobs_take_their_place(fleet, home, state):
    app, phone = fleet.actor(state.tokens["app"]), fleet.actor(state.tokens["phone"])
    home.compile()
    ranks = {job["recipe"]["rank"]: job["state"] for job in everything(app, "/v1/jobs") if job["recipe"]["rank"] > 2}
    assert ranks == {3: "failed", 4: "ready", 5: "ready"}
    job = app.submit(user="zoe", adapter="zoe-new", dataset="new")
    assert job["state"] == "ready"
    assert phone.lease("new")["job"]["id"] == job["id"]
    assert phone.finish(_of(phone, app.submit()))["version"] == 3


def _of(device, job):
    """The lease on one job, after those that wait before it are done."""
    while True:
        lease = device.lease("movies", "new", memory_bytes=2**40)
        if lease["job"]["id"] == job["id"]:
            return lease
        device.finish(lease)
