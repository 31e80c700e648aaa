"""The cache of program files against a server that breaks them."""

import os
import shutil
from collections import namedtuple

import pytest

from device_agent.cache import FileCache
from device_agent.client import DeviceClient
from device_agent.errors import DoesNotFit
from shared.canonical import sha256_hex
from shared.errors import NotFound, Unavailable, Untrusted
from shared.program import ProgramFile
from tests.device_agent.double import ServerDouble

CONTENT = os.urandom(100_000)
FILE = ProgramFile(role="program", name="program.pte", size=len(CONTENT), sha256=sha256_hex(CONTENT))


@pytest.fixture
def server(server_key):
    with ServerDouble(server_key) as double:
        double.files[FILE.sha256] = CONTENT
        yield double


@pytest.fixture
def client(server):
    with DeviceClient(server.url, "token") as client:
        yield client


@pytest.fixture
def cache(tmp_path):
    return FileCache(tmp_path)


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
    assert FileCache(tmp_path).fetch(client, FILE).read_bytes() == CONTENT
    assert server.served["downloads"] == 2


def test_a_cut_off_file_is_fetched_again(server, client, cache):
    path = cache.fetch(client, FILE)
    os.truncate(path, 10)
    assert cache.fetch(client, FILE).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (CONTENT[::-1], Untrusted, "size and sha256"),
        (CONTENT + b"more", Untrusted, "more bytes"),
        (CONTENT[:-1], Unavailable, "dropped a download"),
    ],
    ids=["changed", "longer", "shorter"],
)
def test_what_is_not_the_file_is_refused_and_not_kept(server, client, cache, content, error, words):
    server.files[FILE.sha256] = content
    with pytest.raises(error, match=words):
        cache.fetch(client, FILE)
    assert not cache.path(FILE).exists()


def test_a_bad_part_left_behind_is_overcome(server, client, cache, tmp_path):
    part = tmp_path / f"{FILE.sha256}.part"
    part.write_bytes(b"\0" * FILE.size)
    assert cache.fetch(client, FILE).read_bytes() == CONTENT


def test_a_file_the_server_lacks(server, client, cache):
    server.files.clear()
    with pytest.raises(NotFound):
        cache.fetch(client, FILE)


def test_too_little_disk_is_said_in_numbers(cache, monkeypatch, client):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(50_000_000))
    big = FILE.model_copy(update={"size": 2_000_000_000, "sha256": "0" * 64})
    with pytest.raises(DoesNotFit, match=r"2000 MB more.*50 MB free"):
        cache.reserve([big, FILE])
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10))
    cache.fetch(client, FILE)
    cache.reserve([FILE])  # what is here needs no room
