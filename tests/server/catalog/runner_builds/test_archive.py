"""Archives that may be offered as runners, and those that no device should unpack."""

import gzip
import io
import tarfile

import pytest

from device_agent.runner.archive import pack_runner, unpack_runner
from server.catalog.runner_builds import archive
from server.catalog.runner_builds.archive import read_archive
from shared.errors import BadRequest


def member(name, data=b"x", kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    return info, data


def write(path, *members, compress="gz"):
    with tarfile.open(path, f"w:{compress}") as packed:
        for info, data in members:
            packed.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return path


RUNNER = member("mobizo-runner", b"\x7fELF")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runner.tar.gz"


def test_a_runner_and_its_libraries(path):
    write(path, RUNNER, member("lib/libexecutorch.so"), member("lib/libc++_shared.so.1.2"))
    assert read_archive(path) == path.read_bytes()


@pytest.mark.parametrize(
    "bad",
    [
        member("../mobizo-runner"),
        member("/usr/bin/mobizo-runner"),
        member("./mobizo-runner"),
        member("lib/../../x.so"),
        member("lib/deeper/x.so"),
        member("lib/.hidden.so"),
        member("lib/x.sh"),
        member("bin/x.so"),
        member("README.md"),
        member("lib\\x.so"),
        member("lib/x.so\n"),
        member("lib", kind=tarfile.DIRTYPE),
        member("lib/x.so", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        member("lib/x.so", kind=tarfile.LNKTYPE, link="mobizo-runner"),
        member("lib/x.so", kind=tarfile.FIFOTYPE),
        member("lib/x.so", kind=tarfile.CHRTYPE),
        member("mobizo-runner"),
    ],
    ids=lambda bad: f"{bad[0].name!r} {bad[0].type!r}",
)
def test_anything_else_is_refused_by_name(path, bad):
    write(path, RUNNER, bad)
    with pytest.raises(BadRequest, match="the archive holds"):
        read_archive(path)


def test_without_a_runner(path):
    with pytest.raises(BadRequest, match="no mobizo-runner at its top"):
        read_archive(write(path, member("lib/x.so")))


def test_what_is_no_whole_archive(path, tmp_path):
    whole = write(path, RUNNER, member("lib/x.so", bytes(range(256)) * 100)).read_bytes()
    with pytest.raises(BadRequest, match="cannot be read"):
        read_archive(tmp_path / "nothing")
    for data in (b"", b"text", whole[:-1], whole[: len(whole) // 2], gzip.compress(b"not a tar" * 200)):
        path.write_bytes(data)
        with pytest.raises(BadRequest):
            read_archive(path)
    with pytest.raises(BadRequest, match=r"\.tar\.gz"):
        read_archive(write(path, RUNNER, compress=""))


def test_size_is_bounded_before_and_after_unpacking(path, monkeypatch):
    write(path, RUNNER, member("lib/x.so", bytes(100_000)))
    monkeypatch.setattr(archive, "MOST_BYTES", 100_000)
    with pytest.raises(BadRequest, match="unpacks to more"):
        read_archive(path)
    monkeypatch.setattr(archive, "MOST_BYTES", 200_000)
    read_archive(path)
    monkeypatch.setattr(archive, "MOST_MEMBERS", 1)
    with pytest.raises(BadRequest, match="unpacks to more"):
        read_archive(path)
    monkeypatch.setattr(archive, "MOST_MEMBERS", 2)
    whole = path.read_bytes()
    path.write_bytes(whole + gzip.compress(bytes(200_000)))
    with pytest.raises(BadRequest, match="unpacks to more"):
        read_archive(path)
    monkeypatch.setattr(archive, "MOST_ARCHIVE_BYTES", path.stat().st_size - 1)
    with pytest.raises(BadRequest, match="is over"):
        read_archive(path)


def test_what_the_agent_packs_is_taken_and_what_is_taken_it_unpacks(path, tmp_path):
    built = tmp_path / "built"
    (built / "lib").mkdir(parents=True)
    (built / "mobizo-runner").write_bytes(b"\x7fELF")
    (built / "lib" / "libexecutorch.so.1").write_bytes(b"library")
    (built / "CMakeCache.txt").write_text("left out")
    pack_runner(built, path)
    assert read_archive(path) == path.read_bytes()
    unpack_runner(path, tmp_path / "again")
    assert (tmp_path / "again" / "lib" / "libexecutorch.so.1").read_bytes() == b"library"
