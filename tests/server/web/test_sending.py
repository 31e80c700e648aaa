"""Files that the system sends by itself, when it may not, and what arrives then."""

import asyncio
import errno
import os
import socket
import time

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from server.storage.directory import DiskArtifacts
from server.web import downloads
from server.web.downloads import EXTENSION, FileSpan
from shared.canonical import sha256_hex
from tests.server.conftest import serving

CONTENT = bytes(range(256)) * 20_000  # 5 MB: more than a connection holds
SMALL = b"a model card"


class Ways:
    """Notes of each answer whether the system sent it, and what it failed with."""

    def __init__(self, app):
        self.app = app
        self.extension_uses = []
        self.failures = []

    async def __call__(self, scope, receive, send):
        kinds = set()

        async def send_and_note(message):
            kinds.add(message["type"])
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception as error:
            self.failures.append(type(error))
            raise
        finally:
            if scope["type"] == "http":
                self.extension_uses.append(EXTENSION in kinds)

    def of(self, answers):
        """What is noted once so many answers have ended, which is after their clients have them."""
        deadline = time.monotonic() + 20
        while len(self.extension_uses) < answers and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.extension_uses


@pytest.fixture
def store(tmp_path):
    return DiskArtifacts(tmp_path)


@pytest.fixture
def server(store):
    """Sends `/START-END/SHA256`; its notes, and a client that keeps its connection."""

    async def answer(request):
        start, end = map(int, request.path_params["span"].split("-"))
        headers = {"Content-Length": str(end - start)}
        return FileSpan(store, request.path_params["sha256"], (start, end), 200, headers)

    async def hello(request):
        return PlainTextResponse("hello")

    ways = Ways(Starlette(routes=[Route("/{span}/{sha256}", answer), Route("/hello", hello)]))
    with serving(ways) as url, httpx.Client(base_url=url) as client:
        yield ways, client


@pytest.fixture
def stored(store):
    return store.put(CONTENT)


@pytest.mark.parametrize("span", [(1, len(CONTENT)), (0, len(CONTENT) - 1), (1_000_000, 1_200_000), (0, 1 << 20)])
def test_a_part_is_sent_by_the_system(server, stored, span):
    ways, client = server
    for _ in range(2):  # on one connection
        assert client.get(f"/{span[0]}-{span[1]}/{stored}").content == CONTENT[slice(*span)]
        assert client.get("/hello").text == "hello"
    assert ways.of(4) == [True, False] * 2


def test_a_whole_file_only_once_it_was_found_sound(server, store, stored):
    ways, client = server
    url = f"/0-{len(CONTENT)}/{stored}"
    assert [client.get(url).content == CONTENT for _ in range(2)] == [True, True]
    assert ways.of(2) == [False, True]
    path = store._path(stored)
    path.chmod(0o600)
    path.write_bytes(b"!" + CONTENT[1:])
    with pytest.raises(httpx.RemoteProtocolError):
        client.get(url)
    path.write_bytes(CONTENT)
    assert client.get(url).content == CONTENT
    assert client.get(url).content == CONTENT
    assert ways.of(5) == [False, True, False, False, True]


def test_small_and_empty_files(server, store):
    _, client = server
    for data in (SMALL, b""):
        url = f"/0-{len(data)}/{store.put(data)}"
        assert [client.get(url).content for _ in range(2)] == [data, data]
    assert client.get(f"/2-7/{store.put(SMALL)}").content == SMALL[2:7]


def test_a_client_that_goes_away_is_no_failure_and_harms_nobody(server, stored):
    ways, client = server
    host, port = client.base_url.host, client.base_url.port
    for length in (1, 1000, 300_000, 1_500_000):
        with socket.create_connection((host, port)) as link:
            link.sendall(f"GET /1-{len(CONTENT)}/{stored} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            remaining = length
            while remaining > 0:
                remaining -= len(link.recv(remaining))
    ways.of(4)
    assert client.get(f"/1-{len(CONTENT)}/{stored}").content == CONTENT[1:]
    assert ways.of(5) == [True] * 5
    assert ways.failures == []


def test_a_connection_that_closes_just_before_a_part_is_no_failure(server, stored, monkeypatch):
    begin = downloads._send_file

    async def close_on_the_way(cycle, message):
        asyncio.get_running_loop().call_soon(cycle.transport.abort)
        await begin(cycle, message)

    ways, client = server
    monkeypatch.setattr(downloads, "_send_file", close_on_the_way)
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        client.get(f"/1-{len(CONTENT)}/{stored}")
    assert (ways.of(1), ways.failures) == ([True], [])


def test_where_there_is_no_sendfile_it_is_read_and_written(server, stored, monkeypatch):
    def cannot(*_):
        raise OSError(errno.EINVAL, "not here")

    monkeypatch.setattr(os, "sendfile", cannot)
    ways, client = server
    assert [client.get(f"/1-{len(CONTENT)}/{stored}").content == CONTENT[1:] for _ in range(2)] == [True, True]
    assert (ways.of(2), ways.failures) == ([True, True], [])


def test_a_file_that_shrinks_on_the_way_never_looks_whole(server, store, stored):
    ways, client = server
    with client.stream("GET", f"/1-{len(CONTENT)}/{stored}") as response:
        pieces = response.iter_raw(1000)
        next(pieces)
        store._path(stored).chmod(0o600)
        os.truncate(store._path(stored), 10)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            list(pieces)
    assert client.get("/hello").text == "hello"
    assert len(ways.of(2)) == 2
    assert ways.failures == [EOFError]


def test_without_the_extension_it_goes_in_pieces(store, stored):
    messages = []

    async def send(message):
        messages.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "asgi": {"version": "3.0", "spec_version": "2.4"}}
    asyncio.run(FileSpan(store, stored, (1, 100), 206, {"Content-Length": "99"})(scope, receive, send))
    assert b"".join(message.get("body", b"") for message in messages) == CONTENT[1:100]
    assert dict(messages[0]["headers"])[b"content-length"] == b"99"
    assert sha256_hex(CONTENT) == stored
