"""The audit after the kills detects lost jobs, jobs done twice and damaged files."""

import pytest
from sqlalchemy import update

from bench.server.home import make_home
from bench.server.kills import audit
from server.database.database import Database
from server.jobs.service import JobLifecycle, JobService
from server.schema import jobs
from server.storage.opening import open_artifacts
from shared.job import JobRequest, JobState


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("kills"))


@pytest.fixture
def submit(settings):
    """Adds a job to the home and moves it through states; its id."""
    database, artifacts = Database(settings.url), open_artifacts(settings)

    def submit(adapter, *states):
        body = {"base": "tiny", "user": "user-0", "adapter": adapter, "task": "sst2", "dataset": "d"}
        request = JobRequest.model_validate(body | {"recipe": {"rank": 2, "sequence_length": 16}})
        with database.writing() as session:
            job = JobService(session, artifacts).submit("default", request)
            for state in states:
                JobLifecycle(session).move(job, state)
            return job.id

    yield submit
    with database.writing() as session:
        session.execute(update(jobs.Job).values(state=JobState.CANCELLED, adapter=jobs.Job.id))
    database.close()


TO_THE_END = (JobState.READY, JobState.TRAINING, JobState.SUCCEEDED)


def test_nothing_wrong(settings, submit):
    report = audit(settings, {submit("fine", *TO_THE_END): "fine"})
    assert (report["jobs_lost"], report["jobs_doubled"], report["torn_files"]) == (0, 0, 0)
    assert report["files"] == 1  # the base's tokenizer


def test_jobs_that_are_lost(settings, submit):
    waiting, failed = submit("waiting"), submit("failed", JobState.FAILED)
    succeeded = submit("done", *TO_THE_END)
    submitted = {waiting: "waiting", failed: "failed", succeeded: "done", "job_never": "stored"}
    assert audit(settings, submitted)["jobs_lost"] == 3
    assert audit(settings, {succeeded: "another's"})["jobs_lost"] == 1


def test_jobs_that_are_there_twice(settings, submit):
    once, twice = submit("twice", *TO_THE_END), submit("twice", *TO_THE_END)
    assert audit(settings, {once: "twice", twice: "twice"})["jobs_doubled"] == 2


def test_files_that_are_torn(settings, submit):
    stored = settings.artifacts_path / "objects" / "aa" / ("a" * 64)
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_bytes(b"half of it")
    assert audit(settings, {})["torn_files"] == 1
    stored.unlink()
