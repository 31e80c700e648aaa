"""The log on disk, bounded; and what systemd hears, on a real datagram socket as systemd's."""

import json
import os
import socket
from types import SimpleNamespace

import pytest

from device_agent.daemon.reporting import FEED_SECONDS, LogFile, Watchdog, log_path, readable, tail
from shared.job import Progress


@pytest.fixture
def clock():
    """Seconds `now` that pass when told."""
    return SimpleNamespace(now=1000.0)


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
def watchdog(systemd, clock):
    return Watchdog({"NOTIFY_SOCKET": systemd[1]}, lambda: clock.now)


def step(number):
    return Progress(phase="training", step=number, steps=9)


def test_a_new_phase_is_reported_at_once_and_its_steps_are_not(watchdog, notifications):
    for _ in range(2):
        watchdog.feed()  # a turn of the idle loop, told once
    watchdog.show(Progress(phase="downloading"))
    for number in (1, 2):
        watchdog.show(step(number))
    lines = [line for line in notifications() if line != "WATCHDOG=1"]
    assert lines == ["STATUS=idle", "STATUS=downloading", "STATUS=training  step 1/9"]


def test_a_systemd_that_does_not_read_holds_nobody_up(watchdog, notifications, clock):
    for number in range(10_000):  # more than any socket's queue
        clock.now += FEED_SECONDS
        watchdog.show(step(number))
    assert 0 < notifications().count("WATCHDOG=1") < 10_000


def test_without_systemd_nothing_is_said_and_nothing_breaks(tmp_path, clock):
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        watchdog = Watchdog(environment, lambda: clock.now)
        watchdog.notify("READY=1")
        watchdog.show(step(1))
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
    assert readable(line) == "2026-01-01T00:00:00Z info    job adapter=a b job=j"
    broken = json.dumps({"timestamp": "t", "level": "error", "event": "broke", "exception": "Traceback\n  x"})
    assert readable(broken).endswith("\nTraceback\n  x")
    for torn in ("", "{", "[]", '{"event": "x"}'):
        assert readable(torn) == torn
