"""The operator's command: what it prints, and one line for each error."""

import json
import os

import pytest

from server.catalog import bases
from shared.errors import MobizoError, UnknownBase
from tests.server.cli.conftest import call
from tests.server.homes import base_entry


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `mobizo-server` on a home that nobody has set up."""
    monkeypatch.setenv("MOBIZO_HOME", str(tmp_path / "home"))
    return call


@pytest.fixture
def home(command, tmp_path):
    command("init")
    return tmp_path / "home"


def test_init(command, tmp_path):
    value = json.loads(command("init", "--json"))
    assert value["token"].startswith("mobizo-operator-")
    assert value["tenant"] == "default"
    home = tmp_path / "home"
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / "keys" / "manifest.ed25519").stat().st_mode & 0o777 == 0o600
    key = (home / "keys" / "manifest.ed25519").read_bytes()
    with pytest.raises(MobizoError, match="already set up"):
        command("init")
    assert (home / "keys" / "manifest.ed25519").read_bytes() == key


def test_init_protects_database_and_files_in_an_open_directory(command, tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        command("init")
    finally:
        os.umask(before)
    assert home.stat().st_mode & 0o777 == 0o755
    for path in home.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def test_before_init(command):
    for arguments in (["token", "create", "--role", "app"], ["run"], ["tenant", "list"]):
        with pytest.raises(MobizoError, match="mobizo-server init"):
            command(*arguments)


@pytest.fixture
def inspected(monkeypatch):
    """Stands in for the compiler's look at a model: sha256 by source."""

    def inspect(name, source, artifacts, hub_id):
        if source == "nothing":
            raise UnknownBase
        return base_entry(name, artifacts.put(b"{}"), source=source, hub_id=hub_id, sha256=source[0] * 64)

    monkeypatch.setattr(bases, "inspect", inspect)


def test_bases(command, home, inspected):
    added = json.loads(command("base", "add", "tiny", "a-model", "--json"))
    assert (added["name"], added["sha256"]) == ("tiny", "a" * 64)
    assert json.loads(command("base", "list", "--json")) == [added]
    moved_base = json.loads(command("base", "add", "tiny", "another-place", "--json"))
    assert moved_base["source"] == "another-place"
    with pytest.raises(MobizoError, match="another model"):
        command("base", "add", "tiny", "b-model")
    with pytest.raises(UnknownBase):
        command("base", "add", "other", "nothing")
    assert json.loads(command("base", "list", "--json")) == [moved_base]
    file = home / "tokenizer.json"
    assert json.loads(command("base", "tokenizer", "tiny", str(file), "--json")) == {"name": "tiny", "file": str(file)}
    assert file.read_bytes() == b"{}"
    with pytest.raises(UnknownBase):
        command("base", "tokenizer", "other", str(file))


def test_names_that_are_none(command, home):
    for name in ("", "x" * 201):
        with pytest.raises(MobizoError, match="name"):
            command("base", "add", name, home)
    for hub_id in ("", "no-owner", "../etc/passwd", "a/b/c", "o/" + "x" * 200):
        with pytest.raises(MobizoError, match="looks like OWNER/NAME"):
            command("base", "add", "tiny", home, "--hub-id", hub_id)


def test_running_unsafely(command, home):
    command("run", "--host", "0.0.0.0", code=2)
    with pytest.raises(MobizoError, match="given together"):
        command("run", "--tls-cert", str(home / "mobizo.sqlite3"))


def test_a_relative_source_is_kept_absolute(home, tmp_path, monkeypatch):
    """A worker runs elsewhere and must find the same files."""
    sources = []

    class InspectionReached(Exception):
        pass

    def locate_base(source):
        sources.append(source)
        raise InspectionReached

    monkeypatch.setattr("server.compiler.checkpoints.base.locate_base", locate_base)
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    for source in ("model", "org/model"):
        with pytest.raises(InspectionReached):
            bases.inspect("x", source, None)
    assert sources == [str(tmp_path / "model"), "org/model"]
