"""Backups made while others work, copied to another place, and put to work there."""

import contextlib
import json
import shutil
import threading

import pytest
from sqlalchemy import func, select

from server.app import create_app
from server.database.database import Database
from server.jobs.repository import Job
from server.operations.backup import back_up, named_files
from server.schema import METADATA
from shared.canonical import sha256_hex
from shared.errors import BadRequest, Conflict, Unavailable
from tests.server.actors import Fleet, adapter_bytes, serving
from tests.server.homes import Home


@pytest.fixture
def restored(home, tmp_path):
    """Settings of a copy of a backup."""

    def restored(source):
        shutil.copytree(source, tmp_path / "elsewhere", symlinks=True)
        return home.settings.model_copy(update={"home": tmp_path / "elsewhere"})

    return restored


@contextlib.contextmanager
def busy(fleet):
    """Apps that submit and cancel while it lasts."""
    stop = threading.Event()

    def work(number):
        actor, count = fleet.app(), 0
        while not stop.is_set():
            count += 1
            job = actor.submit(adapter=f"busy-{number}-{count}")
            actor.post(f"/v1/jobs/{job['id']}/cancel")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()


def test_a_job_is_finished_where_the_backup_was_restored(fleet, home, app, device, restored, tmp_path):
    job = fleet.ready_job(app)
    lease = device.lease()
    assert device.upload(lease).status_code == 200
    target = tmp_path / "kept" / "backup"
    with busy(fleet):
        assert back_up(home.settings, target, with_keys=True) >= len(home.stored_files())
    assert [path.name for path in target.parent.iterdir()] == ["backup"]
    assert not [path for path in (target, *target.rglob("*")) if path.stat().st_mode & 0o027]
    settings = restored(target)
    with contextlib.ExitStack() as stack:
        restored_home = stack.enter_context(contextlib.closing(Home(settings, home.source)))
        url = stack.enter_context(serving(create_app(settings)))
        there = stack.enter_context(contextlib.closing(Fleet(restored_home, url)))
        same_app, same_device = (there.actor(actor.token, actor.signer) for actor in (app, device))
        assert same_app.get(f"/v1/jobs/{job['id']}").json()["state"] == "training"
        version = same_device.finish(lease, value=0.25)
        assert same_app.get(f"/v1/jobs/{job['id']}").json()["state"] == "succeeded"
        address = f"/v1/adapters/{version['adapter']}/versions/1/lora_B.safetensors"
        assert same_app.get(address).content == adapter_bytes(lease["manifest"]["manifest"]["size"], 0.25)
        for file in lease["manifest"]["manifest"]["files"]:
            assert sha256_hex(same_device.get(f"/v1/files/{file['sha256']}").content) == file["sha256"]
        # The first server continued without that.
        assert app.get(f"/v1/jobs/{job['id']}").json()["state"] == "training"
        assert same_app.submit(adapter="new")["state"] == "ready"
        assert same_app.get("/v1/server").json() == app.get("/v1/server").json()
    # A job and its first event come in one transaction: a copy has both or neither.
    database = Database(f"sqlite:///{target}/mobizo.sqlite3")
    with database.reading() as session:
        events = METADATA.tables["job_events"]
        count = select(func.count()).select_from(events).where(events.c.job_number == Job.number).scalar_subquery()
        assert session.scalars(select(Job.id).where(Job.events != count)).all() == []
    database.close()


def test_the_command_leaves_the_keys_out(home, restored, tmp_path, command):
    assert json.loads(command("backup", tmp_path / "backup", "--json"))["files"] == 1
    key = home.settings.key_path.read_bytes()
    assert not [path for path in (tmp_path / "backup").rglob("*") if path.is_file() and path.read_bytes() == key]
    with pytest.raises(Conflict, match="exists"):
        command("backup", tmp_path / "backup")
    with pytest.raises(Unavailable, match="signing key"):
        create_app(restored(tmp_path / "backup"))


def test_a_file_that_is_missing_or_damaged_is_no_backup(fleet, home, app, tmp_path):
    fleet.ready_job(app)
    with home.database.reading() as session:
        sha256 = min(named_files(session))
    path = next((home.settings.artifacts_path / "objects").rglob(sha256))
    path.chmod(0o600)
    data = path.read_bytes()
    path.write_bytes(b"x" * len(data))
    with pytest.raises(Unavailable, match="damaged"):
        back_up(home.settings, tmp_path / "backup", with_keys=False)
    path.unlink()
    with pytest.raises(Unavailable, match="missing"):
        back_up(home.settings, tmp_path / "backup", with_keys=False)
    assert list(tmp_path.glob("*backup*")) == []


def test_postgresql_has_its_own_tools(home, tmp_path):
    settings = home.settings.model_copy(update={"database_url": "postgresql://mobizo@localhost/mobizo"})
    with pytest.raises(BadRequest, match="pg_dump"):
        back_up(settings, tmp_path / "backup", with_keys=False)
