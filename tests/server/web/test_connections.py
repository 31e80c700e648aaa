"""Connections that send nothing, half a request, or do not read: each ends, and others are served meanwhile."""

import asyncio
import contextlib
import socket
import time

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from server.storage.directory import DiskArtifacts
from server.web import connections
from server.web.connections import ConnectionLimits
from tests.server.actors import address_of, serving

SECONDS = 0.5  # deadlines in these tests
SIZE = 50_000_000  # bytes of a response, more than a connection holds
PATIENCE = 20
MANY = ConnectionLimits(total=1000, of_address=1000)


async def _hello(request):
    return PlainTextResponse("hello")


async def _endless(request):
    async def pieces():
        while True:
            yield b"x" * 100_000
            await asyncio.sleep(0)

    return StreamingResponse(pieces())


async def _large(request):
    return PlainTextResponse("x" * SIZE)


async def _file(request):
    pieces = request.app.state.store.stream(request.app.state.sha256, 1, SIZE)
    return StreamingResponse(pieces, 206, {"Content-Length": f"{SIZE - 1}"})


APP = Starlette(
    routes=[
        Route("/hello", _hello, methods=["GET", "POST"]),
        Route("/endless", _endless),
        Route("/large", _large),
        Route("/file", _file),
    ]
)


@pytest.fixture
def short(monkeypatch):
    """Deadlines of half a second."""
    for name in ("HEAD_SECONDS", "STALLED_SECONDS", "KEEP_ALIVE_SECONDS"):
        monkeypatch.setattr(connections, name, SECONDS)


@pytest.fixture(scope="module")
def large_file(tmp_path_factory):
    """A stored file that /file sends."""
    APP.state.store = DiskArtifacts(tmp_path_factory.mktemp("store"))
    APP.state.sha256 = APP.state.store.put(bytes(SIZE))


@pytest.fixture
def server(short, large_file):
    """A server with short deadlines: its address."""
    with serving(APP, MANY) as url:
        yield address_of(url)


def open_links(address, count, data=b""):
    """So many connections, each of which sent `data`."""
    links = [socket.create_connection(address, timeout=PATIENCE) for _ in range(count)]
    for link in links:
        link.sendall(data)
    return links


def read_to_end(link):
    """The connection was closed by the server; returns what it sent before."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := link.recv(1 << 20):
            received += piece
    link.close()
    return received


def close_all(*links):
    for link in links:
        link.close()


def read_hello(link):
    """Reads one response of /hello."""
    received = b""
    while b"hello" not in received:
        received += link.recv(1000)


def says_hello(address):
    host, port = address
    return httpx.get(f"http://{host}:{port}/hello", timeout=PATIENCE).text == "hello"


def test_a_head_that_never_ends(server):
    halves = (b"", b"G", b"GET /hello HTTP/1.1\r\nHost: x\r\n")
    links = [link for data in halves for link in open_links(server, 50, data)]
    assert says_hello(server)
    assert [read_to_end(link) for link in links] == [b""] * 150


def trickle(link, data):
    """Sends byte by byte until the server has closed the connection."""
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - began < PATIENCE:
            link.sendall(data[:1])
            data = data[1:] or data
            time.sleep(SECONDS / 10)
    link.close()
    assert time.monotonic() - began < PATIENCE


def test_a_head_that_comes_byte_by_byte(server):
    (link,) = open_links(server, 1)
    trickle(link, b"GET /hello HTTP/1.1\r\nX: x")


def test_a_second_head_that_never_ends(server):
    (link,) = open_links(server, 1, b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
    read_hello(link)
    link.sendall(b"GET")
    assert read_to_end(link) == b""


def test_a_body_that_goes_on_after_the_response(server):
    (link,) = open_links(server, 1, b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    read_hello(link)
    trickle(link, b"x")


def test_a_client_that_does_not_read(server):
    links = []
    for path in ("/endless", "/large", "/file"):
        for headers in ("", "Connection: close\r\n"):
            links += open_links(server, 3, f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
    assert says_hello(server)
    time.sleep(4 * SECONDS)
    for link in links:
        assert len(read_to_end(link)) < SIZE


def test_a_request_in_progress_has_no_deadline_of_its_head(short):
    async def slow(request):
        body = await request.body()
        return PlainTextResponse(str(len(body)))

    with serving(Starlette(routes=[Route("/", slow, methods=["POST"])]), MANY) as url:

        def pieces():
            for _ in range(8):
                time.sleep(SECONDS / 4)
                yield b"x"

        assert httpx.post(url, content=pieces(), timeout=PATIENCE).text == "8"


@pytest.mark.parametrize("data", [b"", b"GET /hello HTTP/1.1\r\nHost: x\r\n"])
def test_idle_and_half_sent_connections_at_the_limit_do_not_stop_others(data):
    with serving(APP, ConnectionLimits(total=20, of_address=1000)) as url:
        address = address_of(url)
        links = []
        for last in range(2, 7):
            for _ in range(20):
                link = socket.create_connection(address, PATIENCE, (f"127.0.0.{last}", 0))
                link.sendall(data)
                links.append(link)
        for _ in range(5):
            assert says_hello(address)
        close_all(*links)


def test_a_request_in_progress_does_not_give_way():
    with serving(APP, ConnectionLimits(total=3, of_address=1000)) as url:
        address = address_of(url)
        (link,) = open_links(address, 1, b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        assert link.recv(100)
        others = [socket.create_connection(address, PATIENCE, ("127.0.0.2", 0)) for _ in range(100)]
        assert says_hello(address)
        for _ in range(200):
            assert link.recv(1 << 20)
        close_all(link, *others)


def test_a_body_that_goes_on_after_the_response_is_read_slowly(monkeypatch):
    monkeypatch.setattr(connections, "UNREAD_PAUSE", 1000)
    with serving(APP, MANY) as url:
        address = address_of(url)
        head = f"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: {SIZE}\r\n\r\n"
        (link,) = open_links(address, 1, head.encode())
        read_hello(link)
        link.settimeout(4 * SECONDS)
        with pytest.raises(TimeoutError):
            link.sendall(b"x" * SIZE)
        assert says_hello(address)
        link.close()


def test_a_request_after_a_body_that_went_on_is_answered():
    with serving(APP, MANY) as url:
        address = address_of(url)
        (link,) = open_links(address, 1, b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        for _ in range(2):
            read_hello(link)
            link.sendall(b"x" * 3_000_000)
            link.sendall(b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        link.close()
