"""Lists on a terminal and in a pipe."""

import pytest
from typer.testing import CliRunner

from mobizo import Client
from mobizo.cli import app as cli
from shared.job import JobRequest
from tests.mobizo.terminal import on_terminal
from tests.server.conftest import job_request


@pytest.fixture
def jobs(fleet, app, monkeypatch):
    monkeypatch.setenv("MOBIZO_SERVER", fleet.url)
    monkeypatch.setenv("MOBIZO_TOKEN", app.token)
    with Client(fleet.url, app.token) as client:
        request = JobRequest.model_validate(job_request(adapter="alice-" + "movies-" * 4 + "1"))
        return [client.jobs.submit(request) for _ in range(3)]


def test_a_narrow_terminal_shows_fewer_columns_and_whole_ids(jobs):
    _, wide = on_terminal("job", "list", columns=140)
    assert wide.splitlines()[0].split() == ["job", "state", "adapter", "user", "created"]
    status, narrow = on_terminal("job", "list", "--limit", "2", columns=60)
    assert status == 0
    first_line, lines = narrow.splitlines()[0], narrow.splitlines()[1:]
    assert "--limit 20 shows more" in first_line
    assert lines[0].split() == ["job", "state", "adapter"]
    assert [line.split()[0] for line in lines[1:3]] == [job.id for job in reversed(jobs)][:2]
    assert all(len(line) <= 60 and line.endswith("…") for line in lines[1:3])
    assert "not shown: user, created" in lines[3]


def test_a_pipe_gets_whole_rows_separated_by_tabs(jobs):
    lines = CliRunner().invoke(cli, ["job", "list"]).stdout.splitlines()
    assert [line.split("\t")[:4] for line in lines] == [
        [job.id, "queued", job.request.adapter, "alice"] for job in reversed(jobs)
    ]


def test_no_rows_say_what_makes_one(fleet, app, monkeypatch):
    monkeypatch.setenv("MOBIZO_SERVER", fleet.url)
    monkeypatch.setenv("MOBIZO_TOKEN", app.token)
    assert "mobizo job submit FILE" in on_terminal("job", "list")[1]
