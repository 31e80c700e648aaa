"""Connections that send nothing, half a request, or do not read: each ends, and others are served meanwhile."""

import asyncio
import contextlib
import resource
import socket
import time

import httpx
import pytest
import structlog
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from server.settings import Settings
from server.storage.directory import DiskArtifacts
from server.web import downloads, limits
from server.web.downloads import FileSpan
from server.web.limits import ConnectionLimits, Listener, raise_descriptor_limit
from tests.server.conftest import serving

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
    return FileSpan(
        request.app.state.store, request.app.state.sha256, (1, SIZE), 206, {"Content-Length": f"{SIZE - 1}"}
    )


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
        monkeypatch.setattr(limits, name, SECONDS)
    monkeypatch.setattr(downloads, "SLOWEST", 1e9)


@pytest.fixture
def server(short, tmp_path):
    """A server with short deadlines: its address."""
    APP.state.store = DiskArtifacts(tmp_path)
    APP.state.sha256 = APP.state.store.put(bytes(SIZE))
    with serving(APP, MANY) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def opened(address, count, data=b""):
    """So many connections, each of which sent `data`."""
    links = [socket.create_connection(address, timeout=PATIENCE) for _ in range(count)]
    for link in links:
        link.sendall(data)
    return links


def ended(link):
    """The connection was closed by the server; returns what it sent before."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := link.recv(1 << 20):
            received += piece
    link.close()
    return received


def read_hello(link):
    """Reads one response of /hello."""
    received = b""
    while b"hello" not in received:
        received += link.recv(1000)


def says_hello(address):
    host, port = address
    return httpx.get(f"http://{host}:{port}/hello", timeout=PATIENCE).text == "hello"


@pytest.mark.parametrize("data", [b"", b"G", b"GET /hello HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_never_ends(server, data):
    links = opened(server, 50, data)
    assert says_hello(server)
    assert [ended(link) for link in links] == [b""] * 50


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
    (link,) = opened(server, 1)
    trickle(link, b"GET /hello HTTP/1.1\r\nX: x")


def test_a_second_head_that_never_ends(server):
    (link,) = opened(server, 1, b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
    read_hello(link)
    link.sendall(b"GET")
    assert ended(link) == b""


def test_a_body_that_goes_on_after_the_response(server):
    (link,) = opened(server, 1, b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    read_hello(link)
    trickle(link, b"x")


@pytest.mark.parametrize("path", ["/endless", "/large", "/file"])
@pytest.mark.parametrize("more", ["", "Connection: close\r\n"])
def test_a_client_that_does_not_read(server, path, more):
    links = opened(server, 5, f"GET {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode())
    assert says_hello(server)
    time.sleep(4 * SECONDS)
    for link in links:
        assert len(ended(link)) < SIZE


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


@pytest.fixture
def log(monkeypatch):
    """Events that are logged, however earlier tests of this process configured logging."""
    capture, everything = structlog.testing.LogCapture(), structlog.make_filtering_bound_logger(0)
    monkeypatch.setattr(limits, "_log", structlog.wrap_logger(None, [capture], wrapper_class=everything))
    return capture.entries


def refusals(log):
    return [entry for entry in log if entry["event"] == "connections-refused"]


def listening(limits):
    listener = Listener(socket.create_server(("127.0.0.1", 0), backlog=200), limits)
    listener.setblocking(False)
    return listener


def accepted(listener):
    """All connections that the listener lets in now."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(listener.accept()[0])
    return found


def from_address(address, count, listener):
    """So many connections from one address."""
    links = []
    for _ in range(count):
        link = socket.socket()
        link.settimeout(PATIENCE)
        link.bind((address, 0))
        link.connect(listener.getsockname())
        links.append(link)
    return links


def close_all(*links):
    for link in links:
        link.close()


def begin_requests(listener, inside):
    """Each of these connections has a request in progress."""
    for link in inside:
        listener.request_began(link.fileno())


def test_connections_beyond_the_total_are_closed(log):
    with listening(ConnectionLimits(total=3, of_address=100)) as listener:
        links = opened(listener.getsockname(), 3)
        inside = accepted(listener)
        begin_requests(listener, inside)
        links += opened(listener.getsockname(), 37)
        assert accepted(listener) == []
        assert [ended(link) for link in links[3:]] == [b""] * 37
        inside.pop().close()
        links += opened(listener.getsockname(), 1)
        inside += accepted(listener)
        assert len(inside) == 3
        close_all(*links, *inside)
    assert len(refusals(log)) == 1


def test_the_oldest_connection_without_a_request_gives_way(log):
    with listening(ConnectionLimits(total=4, of_address=100)) as listener:
        links = opened(listener.getsockname(), 4)
        inside = accepted(listener)
        begin_requests(listener, inside[:1])
        others = from_address("127.0.0.2", 1, listener)
        inside += accepted(listener)
        assert len(inside) == 5
        assert ended(links[1]) == b""
        # A finished request makes its connection the newest of those that wait.
        begin_requests(listener, inside[2:3])
        listener.request_ended(inside[2].fileno())
        others += from_address("127.0.0.2", 1, listener)
        inside += accepted(listener)
        assert len(inside) == 6
        assert ended(links[3]) == b""
        close_all(*links, *others, *inside)
    assert len(refusals(log)) == 1


def test_an_address_with_as_many_connections_as_any_other_is_refused():
    with listening(ConnectionLimits(total=4, of_address=100)) as listener:
        links = from_address("127.0.0.2", 2, listener) + from_address("127.0.0.3", 2, listener)
        inside = accepted(listener)
        refused = from_address("127.0.0.2", 1, listener)
        assert accepted(listener) == []
        assert ended(refused[0]) == b""
        close_all(*links, *inside)


def test_the_address_with_the_most_connections_makes_room():
    with listening(ConnectionLimits(total=4, of_address=100)) as listener:
        first = from_address("127.0.0.2", 1, listener)
        inside = accepted(listener)
        many = from_address("127.0.0.3", 3, listener)
        inside += accepted(listener)
        first += from_address("127.0.0.4", 1, listener)
        inside += accepted(listener)
        assert len(inside) == 5
        assert ended(many[0]) == b""
        close_all(*first, *many, *inside)


def test_connections_of_a_trusted_proxy_have_no_share_and_do_not_give_way():
    for trusted in (("127.0.0.0/8",), ("*",)):
        with listening(ConnectionLimits(total=5, of_address=2, trusted=trusted)) as listener:
            links = opened(listener.getsockname(), 10)
            inside = accepted(listener)
            assert len(inside) == 5
            close_all(*links, *inside)


def test_addresses_have_their_own_shares():
    with listening(ConnectionLimits(total=10, of_address=2)) as listener:
        links, inside = [], []
        for address in ("127.0.0.2", "127.0.0.3"):
            links += from_address(address, 2, listener)
            inside += accepted(listener)
            begin_requests(listener, inside)
            links += from_address(address, 1, listener)
            inside += accepted(listener)
        assert len(inside) == 4
        close_all(*links, *inside)


def test_other_work_has_its_turn_among_many_new_connections():
    with listening(MANY) as listener:
        links = opened(listener.getsockname(), 2 * limits.ACCEPTED_AT_ONCE)
        for _ in range(2):
            inside = accepted(listener)
            assert len(inside) == limits.ACCEPTED_AT_ONCE
            links += inside
        assert accepted(listener) == []
        close_all(*links)


@pytest.mark.parametrize("data", [b"", b"GET /hello HTTP/1.1\r\nHost: x\r\n"])
def test_idle_and_half_sent_connections_at_the_limit_do_not_stop_others(data):
    with serving(APP, ConnectionLimits(total=20, of_address=1000)) as url:
        host, port = url.removeprefix("http://").split(":")
        links = []
        for last in range(2, 7):
            for _ in range(20):
                link = socket.create_connection((host, int(port)), PATIENCE, (f"127.0.0.{last}", 0))
                link.sendall(data)
                links.append(link)
        for _ in range(5):
            assert says_hello((host, int(port)))
        close_all(*links)


def test_a_request_in_progress_does_not_give_way():
    with serving(APP, ConnectionLimits(total=3, of_address=1000)) as url:
        host, port = url.removeprefix("http://").split(":")
        (link,) = opened((host, int(port)), 1, b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        assert link.recv(100)
        others = [socket.create_connection((host, int(port)), PATIENCE, ("127.0.0.2", 0)) for _ in range(100)]
        assert says_hello((host, int(port)))
        for _ in range(200):
            assert link.recv(1 << 20)
        close_all(link, *others)


def test_a_body_that_goes_on_after_the_response_is_read_slowly(monkeypatch):
    monkeypatch.setattr(limits, "UNREAD_PAUSE", 1000)
    with serving(APP, MANY) as url:
        host, port = url.removeprefix("http://").split(":")
        head = f"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: {SIZE}\r\n\r\n"
        (link,) = opened((host, int(port)), 1, head.encode())
        read_hello(link)
        link.settimeout(4 * SECONDS)
        with pytest.raises(TimeoutError):
            link.sendall(b"x" * SIZE)
        assert says_hello((host, int(port)))
        link.close()


def test_a_request_after_a_body_that_went_on_is_answered():
    with serving(APP, MANY) as url:
        host, port = url.removeprefix("http://").split(":")
        (link,) = opened((host, int(port)), 1, b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        for _ in range(2):
            read_hello(link)
            link.sendall(b"x" * 3_000_000)
            link.sendall(b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        link.close()


def test_without_descriptors_connections_are_refused_and_logged_once(log, monkeypatch):
    with listening(MANY) as listener:
        links = opened(listener.getsockname(), 30)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = max(link.fileno() for link in links) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
        try:
            inside = accepted(listener)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        outside = [link for link in links[len(inside) :] if ended(link) == b""]
        assert len(outside) + len(inside) == 30
        assert outside
        for link in (*links, *inside):
            link.close()
        links = opened(listener.getsockname(), 1)
        (again,) = accepted(listener)
        again.close()
        links[0].close()
    (entry,) = refusals(log)
    assert entry["reason"] == "Too many open files"


def test_the_limits_fit_the_descriptors(monkeypatch):
    settings = Settings()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert ConnectionLimits.of(settings).total == 1024 - limits.OTHER_DESCRIPTORS
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert ConnectionLimits.of(settings).total == settings.connections


def test_the_descriptor_limit_is_raised():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], limits.MOST_DESCRIPTORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
