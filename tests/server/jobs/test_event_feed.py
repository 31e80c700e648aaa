"""Many open streams cost one query at a time together, and hold no thread."""

from contextlib import ExitStack

from server.jobs import events
from tests.server.homes import eventually
from tests.server.jobs.test_events import read

STREAMS = 45  # more than the server has threads


def wait_for(events, count):
    """Waits until a list has so many more entries."""
    target = len(events) + count
    eventually(lambda: len(events) >= target)


def open_stream(stack, actor, job):
    """The lines of a job's stream after its first event; the stream is closed when they are no longer referenced."""
    lines = stack.enter_context(actor.stream("GET", f"/v1/jobs/{job}/events")).iter_lines()
    assert any(line.startswith("data:") for line in lines)
    return lines


def test_streams_without_news_make_no_queries_of_their_own(app, standing, monkeypatch):
    reads, looks = [], []
    read_events, look = events._read, events._read_changes
    monkeypatch.setattr(events, "_read", lambda *arguments: reads.append(1) or read_events(*arguments))
    monkeypatch.setattr(events, "_read_changes", lambda *arguments: looks.append(len(arguments[1])) or look(*arguments))
    job = app.submit()["id"]
    with ExitStack() as stack:
        streams = [open_stream(stack, app, job) for _ in range(STREAMS)]
        assert len(streams) == STREAMS
        wait_for(looks, 3)
        assert max(looks) == STREAMS
        read_count = len(reads)
        wait_for(looks, 3)
        assert len(reads) == read_count
        app.post(f"/v1/jobs/{job}/cancel")
        assert read(app, job)[-1][0] == "job"
