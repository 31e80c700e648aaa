"""A listening socket bounds its connections: in all, of one address, and by the process's descriptors."""

import contextlib
import resource
import socket

import pytest
import structlog

from server.settings import Settings
from server.web import connections
from server.web.connections import ConnectionLimits, Listener, raise_descriptor_limit
from tests.server.web.test_connections import MANY, PATIENCE, close_all, open_links, read_to_end


@pytest.fixture
def log(monkeypatch):
    """Events that are logged, however earlier tests of this process configured logging."""
    capture, everything = structlog.testing.LogCapture(), structlog.make_filtering_bound_logger(0)
    monkeypatch.setattr(connections, "_log", structlog.wrap_logger(None, [capture], wrapper_class=everything))
    return capture.entries


def refusals(log):
    return [entry for entry in log if entry["event"] == "connections-refused"]


def listening(limits):
    listener = Listener(socket.create_server(("127.0.0.1", 0), backlog=200), limits)
    listener.setblocking(False)
    return listener


def accepted(listener):
    """All connections that the listener lets in now."""
    connections = []
    with contextlib.suppress(BlockingIOError):
        while True:
            connections.append(listener.accept()[0])
    return connections


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


def begin_requests(listener, inside):
    """Each of these connections has a request in progress."""
    for link in inside:
        listener.request_began(link.fileno())


def test_connections_beyond_the_total_are_closed(log):
    with listening(ConnectionLimits(total=3, of_address=100)) as listener:
        links = open_links(listener.getsockname(), 3)
        inside = accepted(listener)
        begin_requests(listener, inside)
        links += open_links(listener.getsockname(), 37)
        assert accepted(listener) == []
        assert [read_to_end(link) for link in links[3:]] == [b""] * 37
        inside.pop().close()
        links += open_links(listener.getsockname(), 1)
        inside += accepted(listener)
        assert len(inside) == 3
        close_all(*links, *inside)
    assert len(refusals(log)) == 1


@pytest.mark.parametrize("limit", [ConnectionLimits(total=4, of_address=100), ConnectionLimits(100, of_address=2)])
def test_an_address_makes_room_of_its_own_for_connections_beyond_its_share(limit):
    with listening(limit) as listener:
        links = from_address("127.0.0.2", 2, listener) + from_address("127.0.0.3", 2, listener)
        inside = accepted(listener)
        links += from_address("127.0.0.2", 1, listener)
        inside += accepted(listener)
        assert len(inside) == 5
        assert read_to_end(links[0]) == b""
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
        assert read_to_end(many[0]) == b""
        close_all(*first, *many, *inside)


def test_connections_of_a_trusted_proxy_have_no_share_and_do_not_give_way():
    for trusted in (("127.0.0.0/8",), ("*",)):
        with listening(ConnectionLimits(total=5, of_address=2, trusted=trusted)) as listener:
            links = open_links(listener.getsockname(), 10)
            inside = accepted(listener)
            assert len(inside) == 5
            close_all(*links, *inside)


def test_without_descriptors_connections_are_refused_and_logged_once(log, monkeypatch):
    with listening(MANY) as listener:
        links = open_links(listener.getsockname(), 30)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = max(link.fileno() for link in links) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
        try:
            inside = accepted(listener)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        outside = [link for link in links[len(inside) :] if read_to_end(link) == b""]
        assert len(outside) + len(inside) == 30
        assert outside
        for link in (*links, *inside):
            link.close()
        links = open_links(listener.getsockname(), 1)
        (again,) = accepted(listener)
        again.close()
        links[0].close()
    (entry,) = refusals(log)
    assert entry["reason"] == "Too many open files"


def test_the_limits_fit_the_descriptors(monkeypatch):
    settings = Settings()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert ConnectionLimits.of(settings).total == 1024 - connections.OTHER_DESCRIPTORS
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert ConnectionLimits.of(settings).total == settings.connections


def test_the_descriptor_limit_is_raised():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], connections.MAX_DESCRIPTORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
