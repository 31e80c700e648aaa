"""Each check on a server that is right, and on one where just that is wrong."""

import json
import subprocess
import sys
from datetime import timedelta

import pytest
from typer.testing import CliRunner

from server.cli import main as cli
from server.database.columns import utc_now
from server.database.database import Database
from server.database.schema import SchemaBehind
from server.identity.devices.repository import Device
from server.operations import doctor
from server.operations.doctor import (
    check_database,
    check_environment,
    check_home,
    check_key,
    examine,
)
from server.schema import METADATA, upgrade
from server.settings import Settings
from shared.errors import MobizoError


@pytest.fixture
def settings(home):
    home.settings.home.chmod(0o700)
    return home.settings


@pytest.fixture
def loads(monkeypatch):
    """The compiler takes seconds to load; its own check is tested apart."""
    monkeypatch.setattr(doctor, "_COMPILER", "import server.settings")


def states(checks):
    return {check.name: check.state for check in checks}


def test_a_server_that_is_right(settings, loads, home, monkeypatch):
    for name in ("MOBIZO_TEST_CACHE", "MOBIZO_FUZZ_SECONDS"):  # of these tests, and no settings
        monkeypatch.delenv(name, raising=False)
    before = home.stored_files()
    assert "compiler" not in states(examine(settings, quick=True))
    by_name = states(examine(settings))
    assert by_name.pop("memory") in ("ok", "warn")
    assert by_name.pop("disk") in ("ok", "warn")
    assert set(by_name) == {"home", "key", "database", "schema", "clock", "files", "compiler"}
    assert set(by_name.values()) == {"ok"}
    assert home.stored_files() == before


def test_variables_that_no_program_reads():
    good = {"MOBIZO_HOME": "/h", "MOBIZO_DATABASE_PASSWORD_FILE": "/p", "MOBIZO_TOKEN": "t", "MOBIZO_AGENT_HOME": "/a"}
    assert not list(check_environment(good | {"HOME": "/root"}))
    bad = [*check_environment(good | {"MOBIZO_COMPILE_MEMORY_BYTES": "1", "MOBIZO_TOKEN_RAET": "1"})]
    assert [(check.name, check.state) for check in bad] == [("settings", "warn")] * 2
    assert bad[0].detail.startswith("MOBIZO_COMPILE_MEMORY_BYTES is not a setting of this release and has no effect")
    assert bad[1].detail.endswith("did you mean MOBIZO_TOKEN_RATE?")


def test_no_home(tmp_path, loads):
    settings = Settings(home=tmp_path / "nothing")
    checks = {check.name: check for check in examine(settings)}
    assert checks["home"].state == checks["key"].state == checks["database"].state == "fail"
    assert "mobizo-server init" in checks["home"].remedy
    assert not settings.database_url


def test_files_of_the_home_that_are_wrong(settings):
    settings.home.chmod(0o755)
    settings.key_path.write_bytes(b"short")
    assert "chmod 700" in check_home(settings).remedy
    assert check_home(settings).state == check_key(settings).state == "fail"


def test_a_database_that_is_empty_or_away(settings, tmp_path):
    empty = settings.model_copy(update={"database_url": f"sqlite:///{tmp_path}/empty.sqlite3"})
    schema = list(check_database(empty))[-1]
    assert (schema.name, schema.state) == ("schema", "fail")
    assert "mobizo-server migrate" in schema.remedy
    upgrade((database := Database(empty.url)).engine)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE bases DROP COLUMN end_tokens")
    database.close()
    *_, schema = check_database(empty, METADATA)
    assert (schema.name, schema.state) == ("schema", "fail")
    assert "the first is bases.end_tokens" in schema.detail
    unreachable_settings = settings.model_copy(update={"database_url": "postgresql+psycopg://who:secret@127.0.0.1:1/x"})
    (check,) = check_database(unreachable_settings)
    assert (check.name, check.state) == ("database", "fail")
    assert "secret" not in check.line()


def test_a_clock_that_was_set_back(settings, fleet, home):
    device = fleet.device()
    assert states(check_database(settings))["clock"] == "ok"
    home.change(Device, Device.id == device.device_id, last_seen_at=utc_now() + timedelta(hours=1))
    assert states(check_database(settings))["clock"] == "warn"


def test_a_compiler_that_does_not_load(monkeypatch):
    monkeypatch.setattr(doctor, "_COMPILER", "import nothing_of_that_name")
    check = doctor.check_compiler()
    assert check.state == "fail"
    assert "nothing_of_that_name" in check.detail


@pytest.mark.slow
def test_the_compiler_loads():
    assert doctor.check_compiler().state == "ok"


def test_the_command(settings, loads, command):
    lines = [json.loads(line) for line in command("doctor", "--json").splitlines()]
    assert {"name", "state", "detail", "remedy"} == set(lines[0])
    settings.key_path.unlink()
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert isinstance(result.exception, MobizoError)
    assert result.exception.detail == "failed: key"
    assert "mobizo-server init" in result.output


def test_settings_that_cannot_be_are_one_red_line(tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "server.cli.main", "doctor"],
        env={"MOBIZO_PORT": "many", "PYTHONPATH": ":".join(sys.path), "MOBIZO_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert process.stderr.startswith("error: MOBIZO_PORT: ")
    assert process.stderr.count("\n") == 1


def test_migrations_are_a_step_of_their_own(command, tmp_path, monkeypatch):
    monkeypatch.setenv("MOBIZO_DATABASE_URL", f"sqlite:///{tmp_path}/new.sqlite3")
    monkeypatch.setenv("MOBIZO_MIGRATE_AT_START", "false")
    with pytest.raises(SchemaBehind):
        command("tenant", "list")
    applied = json.loads(command("migrate", "--json"))
    assert applied["applied"][0] == "0001"
    assert applied["applied"][-1] == applied["revision"]
    command("tenant", "list")
    assert "up to date" in command("migrate")
