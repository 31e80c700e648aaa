"""The scorer of a server as an operator runs it: it comes and goes with the server, which holds no torch itself."""

import signal
import time
from pathlib import Path

import pytest

from tests.server.operations.test_serving import PATIENCE, family, running, wait_for_exit

EAGER = {"scorer": "eager"}


def scorer_of(process):
    """The scorer's process, once it has loaded torch."""
    deadline = time.monotonic() + PATIENCE
    while True:
        for child in family(process):
            if "server.inference" in child.cmdline() and holds_torch(child.pid):
                return child
        assert time.monotonic() < deadline
        time.sleep(0.05)


def holds_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_its_server(home, number):
    home.settings = home.settings.model_copy(update=EAGER)
    with running(home, "--workers", "0") as (process, _):
        scorer = scorer_of(process)
        assert not holds_torch(process.pid)
        process.send_signal(number)
        assert process.wait(PATIENCE) == (0 if number == signal.SIGTERM else -number)
        wait_for_exit([scorer])
