"""Many open streams cost one query at a time together, and a token has a largest number of them."""

import time
from contextlib import ExitStack

from server.jobs import events
from tests.server.jobs.test_events import read

STREAMS = 12
PATIENCE = 60


def wait_for(events, count):
    """Waits until a list has so many more entries."""
    target, deadline = len(events) + count, time.monotonic() + PATIENCE
    while len(events) < target:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def open_stream(stack, actor, job):
    """The lines of a job's stream after its first event; the stream is closed when they are no longer referenced."""
    lines = stack.enter_context(actor.stream("GET", f"/v1/jobs/{job}/events")).iter_lines()
    assert any(line.startswith("data:") for line in lines)
    return lines


def test_streams_without_news_make_no_queries_of_their_own(fleet, app, standing, monkeypatch):
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


def test_a_token_has_a_largest_number_of_streams(fleet, app, problem, monkeypatch):
    monkeypatch.setattr(events, "MAX_STREAMS", 2)
    job = app.submit()["id"]
    with ExitStack() as stack:
        streams = [open_stream(stack, app, job) for _ in range(2)]
        refusal = problem(app.get(f"/v1/jobs/{job}/events"), 429, "too-many-requests")
        assert refusal["limit"] == "streams"
        streams.append(open_stream(stack, fleet.app(), job))
