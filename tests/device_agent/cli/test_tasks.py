"""The commands by which the owner decides about tasks, and what `status` says of tasks and privacy."""

import json

import pytest

from device_agent.policy.evaluator import OwnerConsent
from device_agent.policy.privacy_ledger import PrivacyCost, PrivacyLedger
from device_agent.policy.task_approvals import MIN_DIGITS, TaskApprovals, task_sha256
from device_agent.training.run_directory import RunDirectory
from shared.errors import BadRequest
from shared.federation.accounting import Spending, epsilon_of
from tests.device_agent.homes import enroll
from tests.device_agent.policy.test_task_approvals import refuse, task_of

URGENCY = task_of()
DIGITS = task_sha256(URGENCY)[:MIN_DIGITS]


@pytest.fixture
def approvals(home):
    task_approvals = TaskApprovals(home.tasks)
    refuse(task_approvals, URGENCY)
    return task_approvals


def test_a_waiting_task_is_shown_whole_and_approved_by_its_digits(invoke, approvals):
    output = invoke("task", "list")
    assert f"waiting  {DIGITS}  urgency for data set tickets" in output
    assert "prompt    '{text} Urgent?'" in output
    assert "answer    ' yes' for 'label' '1'" in output
    assert "'{text} Urgent?'" in invoke("task", "approve", DIGITS)
    approvals.check(URGENCY, "tickets")
    invoke("task", "revoke", DIGITS)
    refuse(approvals, URGENCY)


def test_a_task_is_approved_from_a_file_before_a_job_brings_it(invoke, home, tmp_path):
    file = tmp_path / "urgency.json"
    file.write_text(URGENCY.model_dump_json())
    with pytest.raises(BadRequest, match="name the data sets with --data"):
        invoke("task", "approve", "--file", str(file))
    invoke("task", "approve", "--file", str(file), "--data", "tickets", "--data", "letters")
    for dataset in ("tickets", "letters"):
        TaskApprovals(home.tasks).check(URGENCY, dataset)
    file.write_text("{}")
    with pytest.raises(BadRequest, match="is not a task"):
        invoke("task", "approve", "--file", str(file), "--data", "tickets")
    with pytest.raises(BadRequest, match="name one task"):
        invoke("task", "approve", "--data", "tickets")


def test_status_shows_what_waits_and_what_was_spent(invoke, approvals, home, server_key, tmp_path):
    enroll(home, "http://127.0.0.1:9", server_key)
    spending = Spending(sampling_rate=0.1, noise_multiplier=2.0, times=3)
    for number, spent in enumerate((spending, spending, None)):
        cost = PrivacyCost(job_id=f"job-{number}", dataset="movies", directory=tmp_path, spending=spent)
        run = RunDirectory(tmp_path / f"run-{number}")
        run.path.mkdir()
        PrivacyLedger(home.privacy, OwnerConsent()).charge(cost, run)
    home.rules.write_text("privacy_limit = { movies = 8 }\n")
    epsilon = epsilon_of([spending, spending], 1e-5)
    output = invoke("status")
    assert "tasks that wait for your decision: 1" in output
    assert f"privacy of data set movies: epsilon {epsilon:.3g} (limit 8) at delta 1e-05, 2 private runs" in output
    assert "2 private runs, 1 runs without privacy" in output
    facts = json.loads(invoke("status", "--json"))
    assert facts["tasks_waiting"] == 1
    assert facts["privacy"] == [
        {"dataset": "movies", "epsilon": epsilon, "delta": 1e-5, "limit": 8, "runs": 2, "unprotected": 1}
    ]
