"""A program compiled anew: its next version, while what is there goes on."""

import pytest
from sqlalchemy import select

from server.programs.service import Program, ProgramBlob, ProgramService, ProgramState
from shared.canonical import sha256_hex
from shared.errors import CompileFailed, Conflict, NotFound
from tests.server.programs.test_waiting import Machines


@pytest.fixture
def recompile(home):
    def recompile(recipe_id):
        with home.database.writing() as session:
            ProgramService(session).recompile(recipe_id)

    return recompile


def version(lease):
    return lease["manifest"]["manifest"]["version"]


def test_the_next_lease_has_the_next_version_and_what_trains_goes_on(fleet, home, app, device, lease, recompile):
    recipe_id = lease["job"]["recipe_id"]
    other = app.submit(adapter="other")
    assert other["state"] == "ready"
    recompile(recipe_id)
    # Nobody waits for it, and it is compiled all the same; one who asks now waits for the new one.
    late = app.submit(adapter="late")
    assert late["state"] == "queued"
    home.compile()
    assert app.get(f"/v1/jobs/{late['id']}").json()["state"] == "ready"
    beat = device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training", "step": 1, "steps": 3})
    assert beat.json()["stop"] is False
    for file in lease["manifest"]["manifest"]["files"]:
        assert sha256_hex(device.get(f"/v1/files/{file['sha256']}").content) == file["sha256"]
    device.finish(lease)
    assert version(lease) == 1
    assert version(device.lease()) == 2


def test_without_jobs(home, app, fleet, recompile):
    job = fleet.ready_job(app)
    app.post(f"/v1/jobs/{job['id']}/cancel")
    for number in (2, 3, 4):
        recompile(job["recipe_id"])
        home.compile()
        assert app.get(f"/v1/programs/{job['recipe_id']}").json()["manifest"]["version"] == number
    # Files of the version before stay for those who train with it, and of none that is older.
    assert sorted(set(home.scalars(select(ProgramBlob.version)))) == [3, 4]


def test_what_fails_leaves_what_was_there(fleet, home, app, device, recompile):
    job = fleet.ready_job(app)
    recompile(job["recipe_id"])
    waiting = app.submit(adapter="waiting")
    machines = Machines(home)
    worker = machines.worker("one")
    assert machines.claim(worker) == job["recipe_id"]
    machines.fail(worker, job["recipe_id"], CompileFailed("a bad day"))
    program = machines.program(job["recipe_id"])
    assert (program.state, program.error.detail, program.recompiling) == (ProgramState.READY, "a bad day", False)
    assert app.get(f"/v1/jobs/{waiting['id']}").json()["state"] == "ready"
    assert version(device.lease()) == 1
    assert machines.claim(worker) is None


def test_what_cannot_be_compiled_anew(home, app, recompile):
    with pytest.raises(NotFound, match="program list"):
        recompile("0" * 64)
    job = app.submit()
    with pytest.raises(Conflict, match="pending"):
        recompile(job["recipe_id"])
    assert home.scalar(select(Program.recompiling)) is False
