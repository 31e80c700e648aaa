"""The log on disk, bounded; and what systemd hears, on a real datagram socket as systemd's."""

import json
import os
import socket

import pytest

from device_agent.daemon.reporting import Display, LogFile, Watchdog, log_path, readable, tail
from device_agent.home import AgentHome
from shared.job import Progress


@pytest.fixture(params=["file", "abstract"])
def systemd(request, tmp_path):
    """A datagram socket in the file system, and one in Linux's abstract names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        address = str(tmp_path / "notify") if request.param == "file" else f"@mobizo-test-{os.getpid()}-{tmp_path.name}"
        listener.bind("\0" + address[1:] if address.startswith("@") else address)
        listener.setblocking(False)
        yield listener, address


@pytest.fixture
def notifications(systemd):
    def notifications():
        lines = []
        while True:
            try:
                lines += systemd[0].recv(4096).decode().splitlines()
            except BlockingIOError:
                return lines

    return notifications


@pytest.fixture
def watchdog(systemd):
    return Watchdog({"NOTIFY_SOCKET": systemd[1]})


def step(number):
    return Progress(phase="training", step=number, steps=9)


def test_a_new_phase_is_reported_at_once_and_its_steps_are_not(tmp_path):
    with Display(AgentHome(tmp_path)) as display:
        reports = [display.progress(each) for each in (Progress(phase="downloading"), step(1), step(2))]
    assert reports == [True, True, False]


def test_a_fed_watchdog_hears_the_state(watchdog, notifications):
    watchdog.feed()
    watchdog.feed(step(1).line())
    assert notifications() == ["WATCHDOG=1", "STATUS=idle", "WATCHDOG=1", "STATUS=training  step 1/9"]


def test_a_systemd_that_does_not_read_holds_nobody_up(watchdog, notifications):
    for _ in range(10_000):  # more than any socket's queue
        watchdog.feed()
    assert 0 < notifications().count("WATCHDOG=1") < 10_000


def test_without_systemd_nothing_is_said_and_nothing_breaks(tmp_path):
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        watchdog = Watchdog(environment)
        watchdog.notify("READY=1")
        watchdog.feed()
        watchdog.notify("STOPPING=1")


@pytest.fixture
def path(tmp_path):
    return log_path(tmp_path)


def write(file, count, start=0):
    for number in range(start, start + count):
        file(None, "info", {"event": "turn", "number": number})


def numbers(lines):
    return [json.loads(line)["number"] for line in lines]


def test_events_are_lines_and_are_handed_on_as_they_were(path):
    event = {"event": "job", "job": "job-1", "level": "info"}
    assert LogFile(path)(None, "info", event) is event
    assert [json.loads(line) for line in path.read_text().splitlines()] == [event]
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_the_two_files_stay_within_their_limit_and_hold_the_newest(path):
    write(LogFile(path, limit=1000), 500)
    assert path.stat().st_size <= 1000
    assert path.with_name("agent.jsonl.1").stat().st_size <= 1000
    assert [file.name for file in sorted(path.parent.iterdir())] == ["agent.jsonl", "agent.jsonl.1"]
    newest = numbers(tail(path, 1000))
    assert newest == list(range(newest[0], 500))
    assert len(newest) > 20
    assert numbers(tail(path, 3)) == [497, 498, 499]


def test_a_full_disk_loses_a_line_and_stops_nothing(path):
    file = LogFile(path)
    path.parent.rmdir()
    path.parent.symlink_to("/dev/full")  # any write fails
    event = {"event": "turn"}
    assert file(None, "info", event) is event


def test_lines_for_people():
    line = json.dumps(
        {"timestamp": "2026-01-01T00:00:00Z", "level": "info", "event": "job", "job": "j", "adapter": "a b"}
    )
    assert readable(line).split() == ["2026-01-01T00:00:00Z", "[info", "]", "job", "adapter='a", "b'", "job=j"]
    broken = json.dumps({"timestamp": "t", "level": "error", "event": "broke", "exception": "Traceback\n  x"})
    assert readable(broken).endswith("\nTraceback\n  x")
    for torn in ("", "{", "[]"):
        assert readable(torn) == torn
