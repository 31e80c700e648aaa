"""The log on disk: every event as it was said, in files that do not grow without end."""

import json

import pytest

from device_agent.daemon.logs import LogFile, follow, log_path, older, readable, tail


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
    assert older(path).stat().st_size <= 1000
    assert [file.name for file in sorted(path.parent.iterdir())] == ["agent.jsonl", "agent.jsonl.1"]
    kept = numbers(tail(path, 1000))
    assert kept == list(range(kept[0], 500))
    assert len(kept) > 20
    assert numbers(tail(path, 3)) == [497, 498, 499]


def test_a_full_disk_loses_a_line_and_stops_nothing(path):
    file = LogFile(path)
    path.parent.rmdir()
    path.parent.symlink_to("/dev/full")  # any write fails
    event = {"event": "turn"}
    assert file(None, "info", event) is event


def test_following_sees_lines_of_both_files_and_of_one_not_yet_there(path):
    file = LogFile(path, limit=1000)
    write(file, 3)
    turns = iter([lambda: write(file, 2, 3), lambda: write(file, 28, 5)])

    def wait(_seconds):
        next(turns)()

    lines = follow(path, wait)
    assert numbers([next(lines) for _ in range(2)]) == [3, 4]
    assert numbers([next(lines) for _ in range(28)]) == list(range(5, 33))
    assert older(path).exists()

    fresh = path.with_name("other.jsonl")
    lines = follow(fresh, lambda _seconds: write(LogFile(fresh), 1))
    assert numbers([next(lines)]) == [0]


def test_lines_for_people():
    line = json.dumps(
        {"timestamp": "2026-01-01T00:00:00Z", "level": "info", "event": "job", "job": "j", "adapter": "a b"}
    )
    assert readable(line) == "2026-01-01T00:00:00Z info    job adapter=a b job=j"
    broken = json.dumps({"timestamp": "t", "level": "error", "event": "broke", "exception": "Traceback\n  x"})
    assert readable(broken).endswith("\nTraceback\n  x")
    for torn in ("", "{", "[]", '{"event": "x"}'):
        assert readable(torn) == torn
