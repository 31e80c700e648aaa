"""The control socket over real sockets: who may speak, what is answered, and what a bad peer cannot do."""

import os
import socket
import stat
import subprocess
import sys

import pytest

from device_agent.daemon.control import ControlRequest, ControlResponse, ControlServer, NotRunning, ask
from device_agent.home import DaemonStatus
from shared.errors import BadRequest, MobizoError

HELLO = ControlRequest(ask="status")


def echo(question):
    return ControlResponse(status=DaemonStatus(state=question.ask), lines=("word",) * question.lines)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "control.sock"


@pytest.fixture
def server(path):
    with ControlServer(path, echo) as server:
        yield server


def say(path, data):
    """What comes back for some bytes, to its end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(data)
        return connection.makefile("rb").read()


def test_one_line_in_one_line_out(server, path):
    answer = ask(path, ControlRequest(ask="logs", lines=3))
    assert answer.status.state == "logs"
    assert answer.lines == ("word",) * 3
    assert say(path, b'{"ask": "status"}\n').count(b"\n") == 1


def test_the_socket_is_for_this_user_alone(server, path):
    status = path.stat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_another_user_who_reaches_the_socket_is_refused(tmp_path):
    program = (
        "import os, socket\n"
        "os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect('control.sock'); s.sendall(b'{\"ask\": \"stop\"}\\n')\n"
        "print(s.makefile().read())"
    )
    requests = []
    with ControlServer(tmp_path / "control.sock", lambda question: requests.append(question) or ControlResponse()):
        # As if somebody had opened every permission in the way.
        tmp_path.chmod(0o755)
        (tmp_path / "control.sock").chmod(0o666)
        process = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert "only its own user" in process.stdout, process.stderr
    assert not requests


@pytest.mark.parametrize(
    "data", [b"hello\n", b"{}\n", b'{"ask": "reboot"}\n', b'{"ask": "logs", "lines": 0}\n', b"\xff\n"]
)
def test_a_question_that_is_none_is_answered_so_and_the_next_one_is_heard(server, path, data):
    assert b"unknown request" in say(path, data)
    assert ask(path, HELLO).status.state == "status"


def test_a_line_without_end_is_not_read_for_ever(server, path):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            connection.sendall(b"x" * (1 << 24))
    assert ask(path, HELLO).status.state == "status"


def test_a_handler_that_fails_is_told_and_the_next_question_is_heard(path):
    def handler(question):
        if question.ask == "pause":
            raise BadRequest("not today")
        if question.ask == "stop":
            raise ValueError("broken")
        return ControlResponse()

    with ControlServer(path, handler):
        with pytest.raises(MobizoError, match="not today"):
            ask(path, ControlRequest(ask="pause"))
        with pytest.raises(MobizoError, match="see the agent's log"):
            ask(path, ControlRequest(ask="stop"))
        assert ask(path, HELLO) == ControlResponse()


def test_no_daemon_and_what_a_killed_one_left(path):
    with pytest.raises(NotRunning):
        ask(path, HELLO)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NotRunning):
        ask(path, HELLO)
    with ControlServer(path, echo):
        assert ask(path, HELLO).status.state == "status"
    assert not path.exists()


@pytest.mark.parametrize("length", [107, 108, 300])
def test_a_home_of_any_path_has_a_socket(tmp_path, length):
    directory = tmp_path
    while len(str(directory / "control.sock")) < length:
        missing = length - len(str(directory / "control.sock"))
        # A name of one byte adds two: its slash too.
        directory = directory / ("d" * min(missing - 1 if missing > 1 else 1, 200 if missing != 202 else 199))
    directory.mkdir(parents=True)
    path = directory / "control.sock"
    assert len(str(path)) in (length, length + 1)
    with ControlServer(path, echo):
        assert path.is_socket()
        assert ask(path, HELLO).status.state == "status"
