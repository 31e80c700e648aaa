"""Jobs that go on from an adapter, in the daemon: what it fetches, what it refuses, and that kills cost nothing."""

import numpy as np
import pytest

from device_agent.jobs.leased_job import Outcome
from shared.errors import StartDeleted
from shared.registry import SignedAdapter
from shared.signing import new_private_key, sign_adapter
from tests.device_agent.training.runs import last_b, ledger
from tests.device_agent.warm_starts import random_b, vouched

TRAINING = {"steps": 4, "evaluation_interval": 2}


@pytest.fixture
def start(rademacher, server_key):
    return vouched(rademacher, server_key)


def test_a_job_goes_on_from_the_version_that_it_names(daemon, server, rademacher, home, start):
    server.add_job(rademacher, start=start, **TRAINING)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    run = home.run("job-1")
    trajectory = ledger(run)
    assert trajectory.header.start_sha256 == start[0].manifest.sha256
    last = last_b(run, rademacher)
    np.testing.assert_array_equal(last, trajectory.replay(random_b(rademacher.manifest)))
    (completion,) = server.completions
    assert completion.result.zero_shot_accuracy is None
    assert completion.result.start_accuracy == completion.result.evaluations[0].accuracy


def failure_of(daemon, server):
    """The reason that the server was given for a job that failed here."""
    assert daemon.run(once=True).outcome is Outcome.FAILED
    (failure,) = server.failures
    assert not server.completions
    return failure


def flip_last_bit(signed, data):
    return signed, data[:-1] + bytes([data[-1] ^ 1])


def of_another_server(signed, data):
    false = sign_adapter(signed.manifest, new_private_key())
    return SignedAdapter(**dict(false) | {"key_id": signed.key_id}), data


@pytest.mark.parametrize(
    ("facts", "harm", "words"),
    [
        ({}, flip_last_bit, "sha256"),
        ({}, of_another_server, "signature"),
        ({"a_sha256": "0" * 64}, None, "frozen A"),
    ],
)
def test_a_start_that_is_not_what_its_manifest_says_or_does_not_fit_is_refused(
    daemon, server, rademacher, server_key, home, facts, harm, words
):
    start = vouched(rademacher, server_key, **facts)
    server.add_job(rademacher, start=harm(*start) if harm else start, **TRAINING)
    failure = failure_of(daemon, server)
    assert failure.code == "untrusted"
    assert words in failure.detail
    assert not home.run("job-1").start.exists()


def test_another_version_than_the_jobs_and_one_that_was_deleted_meanwhile(
    daemon, server, rademacher, server_key, start
):
    for served, code in ((vouched(rademacher, server_key, version=2), "untrusted"), ((None, b""), StartDeleted.code)):
        server.add_job(rademacher, start=start, **TRAINING)
        server.starts["job-1"] = served
        assert failure_of(daemon, server).code == code
        server.failures.clear()
