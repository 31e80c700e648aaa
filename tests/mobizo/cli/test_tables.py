"""Lists on a terminal and in a pipe."""

import pytest

from shared.job import JobRequest
from tests.mobizo.terminal import on_terminal
from tests.server.actors import job_request


@pytest.fixture
def jobs(client, command):
    request = JobRequest.model_validate(job_request(adapter="alice-" + "movies-" * 4 + "1"))
    return [client.jobs.submit(request) for _ in range(3)]


def test_a_narrow_terminal_folds_cells_but_no_ids(jobs):
    status, narrow = on_terminal("job", "list", "--limit", "2", columns=60)
    assert status == 0
    assert "--limit 20 shows more" in narrow.splitlines()[0]
    header, *lines = narrow.splitlines()[1:]
    assert header.split()[0] == "job"
    assert [line.split()[0] for line in lines if line.startswith("job_")] == [job.id for job in reversed(jobs)][:2]
    assert jobs[0].request.adapter in on_terminal("job", "list", columns=140)[1]


def test_a_pipe_gets_whole_rows_separated_by_tabs(jobs, command):
    lines = command("job", "list").splitlines()
    assert [line.split("\t")[:4] for line in lines] == [
        [job.id, "queued", job.request.adapter, "alice"] for job in reversed(jobs)
    ]


def test_no_rows_say_what_makes_one(command):
    assert "mobizo job submit FILE" in on_terminal("job", "list")[1]
