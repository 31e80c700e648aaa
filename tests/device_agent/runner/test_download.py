"""The native runner is downloaded only if this server signed it, its versions are right, and nothing else is in it."""

import io
import json
import shutil
import tarfile
from importlib.metadata import version

import pytest

from device_agent.errors import NoRunner
from device_agent.protocol.client import DeviceClient
from device_agent.runner.archive import pack_runner, unpack_runner
from device_agent.runner.download import download_runner
from device_agent.runner.location import EXECUTORCH, RunnerLocation, host_platform
from device_agent.runner.supply import ensure_runner
from shared.canonical import sha256_hex
from shared.catalog import RunnerBuild
from shared.errors import MobizoError, NotFound, Untrusted
from shared.signing import new_private_key, sign_runner_build
from tests.device_agent.fake_server import FakeServer
from tests.device_agent.native import tools_on_path

SCRIPT = '#!/bin/sh\necho \'{{"version": "{version}", "executorch": "{executorch}"}}\'\n'


class RunnerServer(FakeServer):
    """A server that may have a runner."""

    def __init__(self, key):
        super().__init__(key)
        self.signed, self.archive, self.downloads = None, b"", 0

    def offer(self, archive, key=None, **facts):
        self.archive = archive
        defaults = {
            "platform": host_platform(),
            "version": version("mobizo"),
            "executorch": EXECUTORCH,
            "size": len(archive),
            "sha256": sha256_hex(archive),
        }
        self.signed = sign_runner_build(RunnerBuild(**(defaults | facts)), key or self.key)

    def answer(self, method, path, body, headers):
        if not path.startswith("/v1/runner-builds/"):
            return super().answer(method, path, body, headers)
        parts = path.split("/")[3:]
        if self.signed is None:
            error = NotFound()
            return error.status, json.dumps(error.problem()).encode()
        if len(parts) == 1:
            return 200, self.signed.model_dump_json().encode()
        assert parts[1] == self.signed.build.sha256
        self.downloads += 1
        return 200, self.archive


@pytest.fixture
def server(server_key):
    with RunnerServer(server_key) as double:
        yield double


@pytest.fixture
def client(server):
    with DeviceClient(server.url, "device-token") as device_client:
        yield device_client


@pytest.fixture
def sources(tmp_path):
    """Sources that do not build, so that a runner found is a downloaded one."""
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "CMakeLists.txt").write_text('message(FATAL_ERROR "an error of these sources")\n')
    return directory


@pytest.fixture
def place(tmp_path, sources):
    return RunnerLocation(tmp_path / "runners", None, sources)


def discard_line(_line):
    pass


def archive_of(*members):
    """A .tar.gz of (name, content, more facts of the member)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content, facts in members:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o600
            for fact, value in facts.items():
                setattr(member, fact, value)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def script(runner_version=None, executorch=EXECUTORCH):
    return SCRIPT.format(version=runner_version or version("mobizo"), executorch=executorch).encode()


def small_archive():
    return archive_of(("mobizo-runner", script(), {}), ("lib/libx.so", b"library", {}))


def placed_names(place):
    """What lies in the place, besides its notes."""
    return {path.name for path in place.directory.iterdir()} - {"lock", "failed.json"}


def test_the_servers_runner_is_the_one_that_was_built(runner_directory, server, client, place, tmp_path):
    pack_runner(runner_directory, tmp_path / "runner.tar.gz")
    server.offer((tmp_path / "runner.tar.gz").read_bytes())
    directory = download_runner(client, server.key.public_key(), place, discard_line)
    assert directory == place.find()
    files = {path.relative_to(runner_directory) for path in runner_directory.rglob("*") if path.is_file()}
    assert {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()} == files
    assert all((directory / file).read_bytes() == (runner_directory / file).read_bytes() for file in files)
    assert placed_names(place) == {directory.name}


def test_packing_depends_on_the_files_alone(runner_directory, tmp_path):
    copied = shutil.copytree(runner_directory, tmp_path / "copied", copy_function=shutil.copy)
    (copied / "notes.txt").write_text("not the runner's")
    pack_runner(runner_directory, tmp_path / "one.tar.gz")
    pack_runner(copied, tmp_path / "other.tar.gz")
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "other.tar.gz").read_bytes()


@pytest.mark.parametrize(
    ("facts", "error", "message"),
    [
        ({"key": new_private_key()}, Untrusted, "signature"),
        ({"version": "0.0.1"}, NoRunner, r"mobizo 0\.0\.1"),
        ({"executorch": "1.4.0"}, NoRunner, r"ExecuTorch 1\.4\.0"),
        ({"platform": "linux-riscv64"}, Untrusted, "linux-riscv64"),
        ({"sha256": "0" * 64}, Untrusted, "sha256"),
        ({"size": 10}, Untrusted, "more bytes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_runner_that_is_not_the_stated_one_is_refused(server, client, place, facts, error, message):
    server.offer(small_archive(), **facts)
    with pytest.raises(error, match=message):
        download_runner(client, server.key.public_key(), place, discard_line)
    assert place.find() is None
    assert not place.path.exists()


def test_a_runner_for_another_processor_is_not_installed(server, client, place):
    """Signed for this platform by mistake. It is not downloaded again."""
    server.offer(archive_of(("mobizo-runner", b"\x7fELF\2\1\1".ljust(18, b"\0") + b"\xf3\0", {})))
    for message in ("is for riscv64 and the device is", "was tried before.*riscv64"):
        with pytest.raises(NoRunner, match=message):
            download_runner(client, server.key.public_key(), place, discard_line)
    assert server.downloads == 1
    assert place.find() is None


def test_a_statement_that_was_changed_after_it_was_signed_is_refused(server, client, place):
    server.offer(small_archive(), version="0.0.1")
    build = server.signed.build.model_copy(update={"version": version("mobizo")})
    server.signed = server.signed.model_copy(update={"build": build})
    with pytest.raises(Untrusted, match="signature"):
        download_runner(client, server.key.public_key(), place, discard_line)
    assert server.downloads == 0


RUNNER = ("mobizo-runner", b"#!/bin/sh\n", {})


@pytest.mark.parametrize(
    "members",
    [
        [RUNNER, ("../evil.so", b"", {})],
        [RUNNER, ("lib/../../evil.so", b"", {})],
        [RUNNER, ("/tmp/evil.so", b"", {})],
        [RUNNER, ("lib/.so", b"", {})],
        [RUNNER, ("lib/deep/evil.so", b"", {})],
        [RUNNER, ("evil", b"", {})],
        [RUNNER, ("lib/evil.so\n", b"", {})],
        [RUNNER, ("lib/evil.so", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})],
        [RUNNER, ("lib/evil.so", b"", {"type": tarfile.LNKTYPE, "linkname": "mobizo-runner"})],
        [RUNNER, ("lib/evil.so", b"", {"type": tarfile.FIFOTYPE})],
        [("lib", b"", {"type": tarfile.SYMTYPE, "linkname": "/tmp"}), ("lib/evil.so", b"", {})],
        [RUNNER, RUNNER],
        [RUNNER, *((f"lib/lib{index}.so", b"", {}) for index in range(100))],
        [("lib/libx.so", b"", {})],
        [],
    ],
)
def test_an_archive_with_anything_else_in_it_is_refused(members, tmp_path):
    (tmp_path / "archive").write_bytes(archive_of(*members))
    target = tmp_path / "in" / "target"
    with pytest.raises(Untrusted):
        unpack_runner(tmp_path / "archive", target)
    assert {path.name for path in tmp_path.iterdir()} == {"archive", "in"}
    assert list((tmp_path / "in").iterdir()) == [target]
    assert not [path for path in tmp_path.rglob("*evil*") if path.is_symlink()]


def test_an_archive_that_unpacks_to_too_much_is_refused_before_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr("device_agent.runner.archive.MOST_BYTES", 1000)
    (tmp_path / "archive").write_bytes(archive_of(RUNNER, ("lib/libx.so", bytes(2000), {})))
    with pytest.raises(Untrusted):
        unpack_runner(tmp_path / "archive", tmp_path / "target")
    assert not (tmp_path / "target" / "lib" / "libx.so").exists()


@pytest.mark.parametrize("cut", [0, 5, 40, 100, 300])
def test_a_damaged_archive_is_refused(tmp_path, cut):
    (tmp_path / "archive").write_bytes(archive_of(("mobizo-runner", bytes(range(256)) * 40, {}))[:cut])
    with pytest.raises(Untrusted):
        unpack_runner(tmp_path / "archive", tmp_path / "target")


def test_a_bundled_loader_stays_executable_and_no_file_becomes_setuid(tmp_path):
    members = (("mobizo-runner", 0o4600), ("lib/ld-linux-aarch64.so.1", 0o6777), ("lib/libx.so.1.2", 0o4644))
    (tmp_path / "archive").write_bytes(archive_of(*((name, b"", {"mode": mode}) for name, mode in members)))
    unpack_runner(tmp_path / "archive", tmp_path / "target")
    modes = [(tmp_path / "target" / name).stat().st_mode & 0o7777 for name, _ in members]
    assert modes == [0o755, 0o755, 0o644]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"#!/no/such/interpreter\n", "does not start"),
        (b"#!/bin/sh\necho 'version GLIBC_9.99 not found' >&2; exit 1\n", "GLIBC_9.99"),
        (b"#!/bin/sh\necho hello\n", "hello"),
        (script("0.0.1"), r"mobizo 0\.0\.1"),
    ],
)
def test_a_runner_that_does_not_start_here_is_not_placed_and_not_fetched_twice(server, client, place, program, message):
    server.offer(archive_of(("mobizo-runner", program, {})))
    for _ in range(2):
        with pytest.raises(NoRunner, match=message):
            download_runner(client, server.key.public_key(), place, discard_line)
    assert server.downloads == 1
    assert not placed_names(place)


def test_the_server_is_asked_first_and_then_no_more(server, client, place):
    server.offer(small_archive())
    for _ in range(2):
        supply = ensure_runner(place, client, server.key.public_key(), discard_line)
        assert supply.directory == place.path
    assert server.downloads == 1


def test_without_either_way_both_reasons_are_told_and_a_later_runner_of_the_server_is_taken(
    server, client, place, monkeypatch
):
    tools_on_path(monkeypatch)
    supply = ensure_runner(place, client, server.key.public_key(), discard_line)
    assert supply.directory is None
    assert "mobizo-server runner-build add" in supply.reason
    assert "an error of these sources" in supply.reason
    server.offer(small_archive())
    assert ensure_runner(place, client, server.key.public_key(), discard_line).directory == place.path
    assert placed_names(place) == {place.path.name, "build.log"}


def test_a_server_that_is_away_does_not_keep_a_built_runner_from_being_used(place, server_key, runner_directory):
    shutil.copytree(runner_directory, place.path)
    with DeviceClient("http://127.0.0.1:9", "device-token") as client:
        assert ensure_runner(place, client, server_key.public_key(), discard_line).directory == place.path


def test_a_wrong_runner_is_never_raised_to_who_wants_one(server, client, place, monkeypatch):
    tools_on_path(monkeypatch)
    server.offer(small_archive(), key=new_private_key())
    try:
        supply = ensure_runner(place, client, server.key.public_key(), discard_line)
    except MobizoError as error:
        pytest.fail(f"raised {error!r}")
    assert "signature" in supply.reason
