"""Strangers and an honest client behind one address (NAT): idle connections of the ones do not shut out the other."""

import contextlib
import socket

import pytest

from server.app import create_app
from server.web.connections import ConnectionLimits
from tests.server.actors import address_of, serving

DATABASES = ("sqlite",)
CAP = 20
LIMITS = {"address": ConnectionLimits(total=1000, of_address=CAP), "all": ConnectionLimits(total=CAP, of_address=1000)}
PATIENCE = 60


def strangers(stack, address, count, data):
    """So many connections that ask for nothing, or for half of it."""
    links = [stack.enter_context(socket.create_connection(address, timeout=PATIENCE)) for _ in range(count)]
    for link in links:
        with contextlib.suppress(ConnectionError):
            link.sendall(data)
    return links


def whoami(link, token):
    """The status of a request on a connection that stays open."""
    link.sendall(f"GET /v1/whoami HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    received = b""
    while not received.endswith(b"}"):
        piece = link.recv(4096)
        assert piece, "the server closed the connection"
        received += piece
    return int(received.split()[1])


@pytest.mark.parametrize("data", [b"", b"GET /v1/whoami HTTP/1.1\r\nHost: x\r\n"], ids=["idle", "half-sent"])
@pytest.mark.parametrize("bound", LIMITS)
def test_strangers_of_its_address_do_not_shut_out_a_client_with_a_token(home, bound, data):
    with serving(create_app(home.settings), LIMITS[bound]) as url, contextlib.ExitStack() as stack:
        address, token = address_of(url), home.token("app")
        strangers(stack, address, CAP, data)
        (first,) = strangers(stack, address, 1, b"")
        assert whoami(first, token) == 200
        for _ in range(3):
            strangers(stack, address, 2 * CAP, data)
            # The connection that has shown a valid token is still open, and a new one is served.
            assert whoami(first, token) == 200
            (new,) = strangers(stack, address, 1, b"")
            assert whoami(new, token) == 200
        assert whoami(first, "mobizo-app-" + "x" * 43) == 401
        # Now it is one of the strangers.
        strangers(stack, address, 2 * CAP, data)
        with contextlib.suppress(ConnectionError):
            assert first.recv(1) == b""
