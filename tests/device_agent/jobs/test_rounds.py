"""A device's part in a cohort's rounds, in the daemon: whether it takes part, what it sends, and what it remembers."""

import json
from datetime import UTC, datetime

import numpy as np
import pytest

from device_agent.inference.adapter_store import AdapterStore
from device_agent.jobs.leased_job import Outcome
from device_agent.jobs.rounds import KEPT_ROUNDS, RoundRecord, log_round, past_rounds
from shared.errors import RoundClosed
from shared.federation.cohort import AlgorithmSettings, RoundTask
from shared.zo.lora import load_adapter
from shared.zo.replay import replay
from shared.zo.trajectory_reader import read_ledger
from tests.device_agent.warm_starts import random_b, vouched

TRAINING = {"steps": 6, "lr": 0.5, "seed": 5, "evaluation_interval": 3}


def task(**changes):
    facts = {"cohort": "reviews", "number": 3, "algorithm": AlgorithmSettings(), "deadline": datetime.now(UTC)}
    return RoundTask(**facts | changes)


@pytest.fixture
def work(enrolled, make):
    """Has the daemon do the job that waits, under the owner's rules; how it ended."""

    def work(rules="cohorts = true"):
        enrolled.rules.write_text(rules)
        return make(enrolled).run(once=True)

    return work


def test_the_last_b_goes_and_is_no_adapter_of_this_devices(work, server, server_key, rademacher, home):
    start = vouched(rademacher, server_key)
    server.add_job(rademacher, start=start, task_of_round=task(), **TRAINING)
    assert work('cohorts = ["reviews"]').outcome is Outcome.COMPLETED
    (upload,), (completion,) = server.uploads, server.completions
    run = home.run("job-1")
    assert upload == run.last.read_bytes()
    assert not server.trajectories
    trajectory = read_ledger(run.trajectory.read_bytes())
    expected = replay(trajectory, random_b(rademacher.manifest))
    np.testing.assert_array_equal(load_adapter(upload, rademacher.manifest.size), expected)
    validations = completion.result.evaluations
    assert completion.result.start_accuracy == validations[0].accuracy
    assert completion.result.tuned_accuracy == validations[-1].accuracy
    assert AdapterStore(home).stored() == []
    (past,) = past_rounds(home.rounds)
    assert (past.cohort, past.round, past.job_id, past.outcome) == ("reviews", 3, "job-1", "completed")
    assert (past.form, past.bytes, past.steps) == ("weights", len(upload), 6)
    assert (past.before_accuracy, past.after_accuracy) == (validations[0].accuracy, validations[-1].accuracy)


def test_without_leave_for_trajectories_b_goes_instead(work, server, rademacher, home):
    server.add_job(rademacher, task_of_round=task(upload="trajectory"), **TRAINING)
    assert work("cohorts = true").outcome is Outcome.COMPLETED
    assert not server.trajectories
    assert server.uploads == [home.run("job-1").last.read_bytes()]


@pytest.mark.parametrize(
    "rules",
    ["", "cohorts = false", 'cohorts = ["notes"]', "trajectory = true", "cohorts = true\nmasked_among = 3"],
)
def test_without_the_owners_leave_the_job_is_given_back_untouched(work, server, rademacher, home, rules):
    """However the server came to offer it."""
    server.add_job(rademacher, task_of_round=task(), **TRAINING)
    job_end = work(rules)
    assert job_end.outcome is Outcome.RELEASED
    assert "this device's rules.toml" in job_end.detail
    assert "cohort 'reviews'" in job_end.detail
    assert ("POST", "release") in server.calls
    assert not server.uploads
    assert not home.run("job-1").path.exists()
    assert past_rounds(home.rounds) == []


@pytest.mark.parametrize("of", [None, task(number=2), task(cohort="notes")])
def test_half_a_round_is_refused(work, server, rademacher, of):
    server.add_job(rademacher, task_of_round=task(), **TRAINING)
    if of is None:
        del server.rounds["job-1"]
    else:
        server.rounds["job-1"] = of
    assert work().outcome is Outcome.FAILED
    assert [failure.code for failure in server.failures] == ["untrusted"]


def test_a_part_may_count_in_a_later_round_than_it_was_made_for(work, server, rademacher, home):
    server.add_job(rademacher, task_of_round=task(), **TRAINING)
    server.rounds["job-1"] = task(number=4)
    assert work().outcome is Outcome.COMPLETED
    assert [past_round.round for past_round in past_rounds(home.rounds)] == [4]


def test_a_round_that_ended_before_is_remembered_as_lost(work, server, rademacher, home):
    server.broken["complete"] = [RoundClosed("round 3 of cohort reviews has ended")]
    server.add_job(rademacher, task_of_round=task(), **TRAINING)
    job_end = work()
    assert job_end.outcome is Outcome.LOST
    assert "most likely its round has ended" in job_end.detail
    (past,) = past_rounds(home.rounds)
    assert (past.outcome, past.form, past.bytes) == ("lost", None, 0)
    assert past.detail == job_end.detail


def test_a_round_that_goes_on_without_this_device_is_remembered(work, server, rademacher, home):
    server.stop.set()
    server.add_job(rademacher, task_of_round=task(), **TRAINING | {"steps": 20_000, "evaluation_interval": 20_000})
    assert work().outcome is Outcome.CANCELLED
    (past,) = past_rounds(home.rounds)
    assert (past.outcome, past.bytes) == ("cancelled", 0)
    assert "the round ended" in past.line()


def past_of(number, **changes):
    return RoundRecord(cohort="reviews", round=number, job_id=f"job-{number}", outcome="completed", **changes)


def test_the_log_forgets_the_oldest_and_outlives_a_torn_line(tmp_path):
    path = tmp_path / "rounds.jsonl"
    assert past_rounds(path) == []
    for number in range(1, 4):
        log_round(path, past_of(number))
    path.write_bytes(path.read_bytes()[:-20])
    log_round(path, past_of(4))
    assert [past_round.round for past_round in past_rounds(path)] == [1, 2, 4]
    path.write_bytes(b"".join(past_of(n).model_dump_json().encode() + b"\n" for n in range(1, 2 * KEPT_ROUNDS + 1)))
    log_round(path, past_of(9999))
    assert len(path.read_bytes().splitlines()) == KEPT_ROUNDS
    assert [past_round.round for past_round in past_rounds(path)[-2:]] == [2 * KEPT_ROUNDS, 9999]
    assert path.stat().st_mode & 0o777 == 0o600


def test_past_rounds_are_shown(invoke, home):
    assert "none yet" in invoke("round", "list")
    log_round(home.rounds, past_of(3, form="weights", bytes=1234, before_accuracy=0.5, after_accuracy=0.625))
    words = "round 3 of reviews  completed  1,234 bytes (weights)  validation 50.0% -> 62.5%"
    assert words in invoke("round", "list")
    assert json.loads(invoke("round", "list", "--json"))["bytes"] == 1234
