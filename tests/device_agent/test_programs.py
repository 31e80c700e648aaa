"""The cache of program files against a server that breaks them; and versions of programs only rise."""

import fcntl
import os
import shutil
from types import SimpleNamespace

import pytest

from device_agent.errors import DoesNotFit
from device_agent.programs import ProgramCache, check_rollback
from device_agent.protocol.client import DeviceClient
from shared.canonical import sha256_hex
from shared.errors import Unavailable, Untrusted
from shared.program import ProgramFile
from tests.device_agent.homes import enroll

CONTENT = os.urandom(100_000)
FILE = ProgramFile(role="program", name="program.pte", size=len(CONTENT), sha256=sha256_hex(CONTENT))


@pytest.fixture
def server(server):
    server.files[FILE.sha256] = CONTENT
    return server


@pytest.fixture
def client(server):
    with DeviceClient(server.url, "token") as client:
        yield client


@pytest.fixture
def cache(tmp_path):
    return ProgramCache(tmp_path)


def test_a_file_is_fetched_once(server, client, cache):
    assert cache.fetch(client, FILE).read_bytes() == CONTENT
    cache.fetch(client, FILE)
    assert server.served["downloads"] == 1
    assert cache.path(FILE).name == FILE.sha256


def test_a_file_of_an_earlier_process_is_hashed_again(server, client, cache, tmp_path):
    path = cache.fetch(client, FILE)
    damaged = bytearray(CONTENT)
    damaged[5000] ^= 1
    path.write_bytes(damaged)
    assert ProgramCache(tmp_path).fetch(client, FILE).read_bytes() == CONTENT
    assert server.served["downloads"] == 2


def test_what_is_not_the_file_is_refused_and_not_kept(server, client, cache):
    server.files[FILE.sha256] = CONTENT[::-1]
    with pytest.raises(Untrusted, match="size and sha256"):
        cache.fetch(client, FILE)
    assert not cache.path(FILE).exists()


def test_a_bad_part_left_behind_is_overcome_unless_another_process_downloads_it(server, client, cache, tmp_path):
    part = tmp_path / f"{FILE.sha256}.part"
    part.write_bytes(b"\0" * FILE.size)
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="another process of the agent"):
            cache.fetch(client, FILE)
        assert server.served["downloads"] == 0
    assert cache.fetch(client, FILE).read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == [FILE.sha256]


def set_disk(monkeypatch, total, free):
    """Has the disk this many bytes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(total=total, free=free))


def test_too_little_disk_is_said_in_numbers(cache, monkeypatch, client):
    set_disk(monkeypatch, 10**11, 50_000_000)
    big = FILE.model_copy(update={"size": 2_000_000_000, "sha256": "0" * 64})
    with pytest.raises(DoesNotFit, match=r"2000 MB on disk.*50 MB free"):
        cache.reserve([big, FILE])
    set_disk(monkeypatch, 10**11, 10)
    cache.fetch(client, FILE)
    cache.reserve([FILE])  # what is here needs no room


def file_of(letter, size):
    content = (letter * size).encode()
    return ProgramFile(role="program", name=f"{letter}.pte", size=size, sha256=sha256_hex(content)), content


@pytest.fixture
def files(server):
    """Files of 40 kB that the server has, by letter."""
    pairs = {letter: file_of(letter, 40_000) for letter in "abcd"}
    server.files |= {file.sha256: content for file, content in pairs.values()}
    return {letter: file for letter, (file, _) in pairs.items()}


def here(cache, files):
    return "".join(letter for letter, file in files.items() if cache.path(file).exists())


def bring(cache, client, *files):
    cache.reserve(files)
    for file in files:
        cache.fetch(client, file)


def test_the_file_unused_for_longest_makes_room(tmp_path, client, files):
    cache = ProgramCache(tmp_path, limit=120_000)
    for letter in "abc":
        bring(cache, client, files[letter])
    bring(cache, client, files["a"])  # used again, so b is the oldest now
    bring(cache, client, files["d"])
    assert here(cache, files) == "acd"


def test_what_a_run_or_a_kept_adapter_needs_stays(tmp_path, client, files):
    cache = ProgramCache(tmp_path, limit=120_000, pins=lambda: [files["a"].sha256])
    for letter in "abc":
        bring(cache, client, files[letter])
    with cache.hold([files["b"]]):
        bring(cache, client, files["d"])
        assert here(cache, files) == "abd"
        # a, b and d itself: nothing is left that could go.
        with pytest.raises(DoesNotFit, match=r"at most 0 MB, of which runs and stored adapters use 0 MB"):
            cache.reserve([files["c"], files["d"]])
        assert here(cache, files) == "abd"
    bring(cache, client, files["c"])
    assert here(cache, files) == "acd"


def test_a_full_disk_makes_room_too(tmp_path, client, files, monkeypatch):
    cache = ProgramCache(tmp_path, limit=10**9)
    bring(cache, client, files["a"])
    bring(cache, client, files["b"])
    set_disk(monkeypatch, 10**11, (64 << 20) + 30_000)
    bring(cache, client, files["c"])
    assert here(cache, files) == "bc"


def test_by_default_it_takes_half_a_small_disk_at_most(tmp_path, files, monkeypatch):
    set_disk(monkeypatch, 4 * 10**9, 3.9 * 10**9)
    cache = ProgramCache(tmp_path)
    cache.reserve([FILE.model_copy(update={"size": 1_900_000_000, "sha256": "0" * 64})])
    with pytest.raises(DoesNotFit, match="at most 2000 MB"):
        cache.reserve([FILE.model_copy(update={"size": 2_100_000_000, "sha256": "0" * 64})])


def version(program, number, recipe_id=None):
    changes = {"version": number} | ({"recipe_id": recipe_id} if recipe_id else {})
    return program.manifest.model_copy(update=changes)


def test_an_older_version_is_refused_until_the_device_is_enrolled_again(home, rademacher, server_key):
    for number in (1, 3, 3):
        check_rollback(home.program_versions, version(rademacher, number))
    with pytest.raises(Untrusted, match=r"version 2 of recipe .* seen version 3.*enroll this device again"):
        check_rollback(home.program_versions, version(rademacher, 2))
    check_rollback(home.program_versions, version(rademacher, 4))
    check_rollback(home.program_versions, version(rademacher, 1, recipe_id="a" * 64))  # of its own version
    enroll(home, "http://server", server_key)
    check_rollback(home.program_versions, version(rademacher, 1))


def test_a_damaged_file_lets_nothing_old_in(home, rademacher):
    home.program_versions.write_text("{")
    with pytest.raises(Untrusted, match=r"seen\.json cannot be read; enroll"):
        check_rollback(home.program_versions, version(rademacher, 1))


def test_packed_weights_make_room_before_any_program_and_not_for_the_run(client, server, tmp_path):
    current, other = (tmp_path / f"{letter * 64}.packed" for letter in "ab")
    for path in (current, other):
        path.write_bytes(bytes(50_000))
        path.with_name(f"{path.name}.index").write_bytes(b"index")
    cache = ProgramCache(tmp_path, limit=250_000)
    cache.fetch(client, FILE)
    current_file = FILE.model_copy(update={"sha256": "a" * 64})
    with cache.hold([current_file]):
        cache.reserve([FILE.model_copy(update={"sha256": "c" * 64})])
    assert cache.holds(FILE)
    assert current.exists()
    assert sorted(path.name[:1] for path in tmp_path.glob("*.index")) == ["a"]
