"""Ports: what is not connected fails when it is used, and one implementation is connected at most."""

import pytest

from server.ports import Port
from server.wiring import wire


def test_a_port_that_was_not_connected():
    port = Port("jobs.nothing")
    with pytest.raises(RuntimeError, match=r"'jobs.nothing' is not connected: call server.wiring.wire"):
        port.get()


def test_a_port_has_one_implementation():
    port = Port("jobs.one")
    port.connect(("first",))
    port.connect(("first",))
    with pytest.raises(RuntimeError, match="something else"):
        port.connect(("second",))
    assert port.get() == ("first",)


def test_wiring_twice_changes_nothing():
    wire()
    wire()
