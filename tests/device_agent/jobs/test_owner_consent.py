"""Attacks by a submitter: reading records through failures, and spending more privacy than the owner allows.

The submitter brings the task, the settings and the user's name, and sees everything that the device sends.
"""

import json
import shutil
from types import SimpleNamespace

import pytest

from device_agent.executors.choice import ExecutorName, LauncherSelector
from device_agent.executors.runner import RunnerLauncher
from device_agent.jobs.leased_job import Outcome
from device_agent.policy.task_approvals import TaskApprovals, TaskState
from device_agent.runner.location import RUNNER_VARIABLE
from shared.federation.accounting import epsilon_of, run_spending
from shared.privacy import ExamplePrivacy
from shared.task import Answer, MappedField, Task
from shared.zo.lora import load_adapter
from tests.device_agent.tiny import write_records
from tests.device_agent.training.runs import Killed

PRIVACY = ExamplePrivacy(clip=0.05, noise_multiplier=2.0, sampling_rate=0.1)
STEPS = 3
ANSWERS = (Answer(text=" terrible", labels=("negative",)), Answer(text=" great", labels=("positive",)))


@pytest.fixture
def work(enrolled, make, server):
    """Works on the jobs of the server with a data set, one after the other; returns their ends."""

    def work(directory):
        daemon = make(enrolled, {"movies": directory})
        return [daemon.run(once=True) for _ in range(len(server.jobs))]

    return work


def records_with(tmp_path, secret):
    """A data set whose records all have a code; only one of them is secret."""
    directory = tmp_path / f"data-{secret}"
    directory.mkdir()
    write_records(directory / "train.jsonl", 40, 0)
    lines = [json.loads(line) | {"code": "0"} for line in (directory / "train.jsonl").read_text().splitlines()]
    lines[7]["code"] = secret
    (directory / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def half_of_the_codes(bit):
    """A task that fits a record if and only if a bit of its code is 0."""
    codes = {str(code): "a" for code in range(8) if not code >> bit & 1}
    return Task(
        name="guess", prompt="{text}{asked}", answers=ANSWERS, mapped={"asked": MappedField(field="code", values=codes)}
    )


def is_the_code(secret):
    """A task whose answers are the codes: it fits records of code 0 and of one guess."""
    answers = (Answer(text=" a", labels=("0",)), Answer(text=" b", labels=(secret,)))
    return Task(name="guess", prompt="{text}", answers=answers, label_field="code")


def reports_to(server):
    """What the server was told by the jobs, without times, memory and what was measured."""
    excluded = {"train_seconds", "seconds", "phase_seconds", "peak_rss_bytes"}
    # Of a run without privacy, whose B is uploaded too:
    excluded |= {"evaluations", "tuned_accuracy", "zero_shot_accuracy", "best_step", "reference_loss_change"}
    results = [completion.result.model_dump(exclude=excluded) for completion in server.completions]
    return [failure.model_dump() for failure in server.failures], results


@pytest.mark.parametrize("privacy", [None, PRIVACY])
def test_tasks_that_the_owner_does_not_know_read_nothing(work, server, rademacher, clipped, tmp_path, privacy):
    program = rademacher if privacy is None else clipped
    reports = {}
    for secret in ("2", "5"):
        for bit in range(3):
            task = half_of_the_codes(bit)
            server.add_job(program, job_id=f"job-{secret}-{bit}", task=task, privacy=privacy, steps=STEPS)
        directory = records_with(tmp_path, secret)
        ends = work(directory)
        assert {end.outcome for end in ends} == {Outcome.FAILED}
        reports[secret] = reports_to(server)
        server.failures.clear()
    assert reports["2"] == reports["5"]
    assert {failure["code"] for failure in reports["2"][0]} == {"task-not-approved"}
    assert server.served["downloads"] == 0


@pytest.mark.parametrize("privacy", [None, PRIVACY])
@pytest.mark.parametrize("task", [half_of_the_codes(0), is_the_code("5")], ids=["field", "label"])
def test_an_approved_task_tells_nothing_of_a_single_record_that_does_not_fit(
    home, work, server, rademacher, clipped, tmp_path, privacy, task
):
    program = rademacher if privacy is None else clipped
    TaskApprovals(home.tasks).decide(task, ["movies"], TaskState.APPROVED)
    reports = {}
    for secret in ("2", "5"):
        server.add_job(program, job_id=f"job-{secret}", task=task, privacy=privacy, steps=STEPS)
        (job_end,) = work(records_with(tmp_path, secret))
        assert job_end.outcome is Outcome.COMPLETED
        reports[secret] = reports_to(server)
        server.completions.clear()
        server.uploads.clear()
    assert reports["2"] == reports["5"]


UNUSUAL = {  # lines that do not fit, and the reason that the owner reads
    b"{SECRET": "is not JSON",
    b'["SECRET"]': "must be a JSON object",
    b"\xff\xfeSECRET": "is not UTF-8",
    b'{"text": "SECRET \\ud800", "label": "positive"}': "",  # half of a character
    b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b', "label": "positive"}': "",
    b'{"text": ' + b"7" * 5_000 + b', "label": "positive"}': "",
    b'{"text": "SECRET", "label": "SECRET"}': "SECRET",
    b'{"text": "SECRET"}': "field 'label' is missing",
    b'{"text": "SECRET", "label": Infinity}': "field 'label' is missing or null",
}
LONG = b'{"text": "' + b"SECRET " * 500 + b'", "label": "positive"}'  # is cut


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_no_single_line_ends_a_job(work, server, rademacher, dataset, home, split):
    first = len((dataset / f"{split}.jsonl").read_text().splitlines()) + 1
    with (dataset / f"{split}.jsonl").open("ab") as file:
        file.writelines(line + b"\n" for line in (*UNUSUAL, LONG))
    server.add_job(rademacher, steps=1)
    (job_end,) = work(dataset)
    assert job_end.outcome is Outcome.COMPLETED, job_end.detail
    assert server.failures == []
    (completion,) = server.completions
    assert completion.result.train_examples == 13 + (len(UNUSUAL) + 1) * (split == "train")
    assert completion.result.unusable_examples is None
    assert b"SECRET" not in server.received_bytes
    summary, *reasons = (home.run("job-1").path / "unusable.log").read_text().splitlines()
    assert summary.startswith(f"{len(UNUSUAL)} records of the data set do not fit task 'sst2'")
    for number, (reason, words) in enumerate(zip(reasons, UNUSUAL.values(), strict=True), first):
        assert f"{dataset / split}.jsonl:{number}: " in reason
        assert words in reason


@pytest.mark.parametrize("usable", [0, 1, 6, 7, 8])
def test_no_single_record_decides_whether_a_job_without_privacy_fails(work, server, rademacher, dataset, home, usable):
    """Around the least share of this data set's 13 records, and around none at all."""
    lines = (dataset / "train.jsonl").read_text().splitlines()
    (dataset / "train.jsonl").write_text("\n".join([*lines[:usable], *['{"SECRET": 1}'] * (13 - usable)]))
    server.add_job(rademacher, steps=2, evaluation_interval=1)
    (job_end,) = work(dataset)
    assert job_end.outcome is Outcome.COMPLETED, job_end.detail
    (completion,) = server.completions
    assert (completion.result.train_examples, completion.result.unusable_examples) == (13, None)
    last = load_adapter(home.run("job-1").last.read_bytes(), rademacher.manifest.size)
    assert bool(last.any()) == (usable > 0)  # without a usable record nothing is trained


def test_a_private_job_ends_alike_whatever_the_records_are(work, server, clipped, dataset):
    training = {"steps": STEPS, "seed": 5}
    for number, content in enumerate((b"", b"{SECRET\n", b'{"text": "warm", "label": "positive"}\n' * 3)):
        (dataset / "train.jsonl").write_bytes(content)
        server.add_job(clipped, job_id=f"job-{number}", privacy=PRIVACY, **training)
        (job_end,) = work(dataset)
        assert job_end.outcome is Outcome.COMPLETED, job_end.detail
    failures, results = reports_to(server)
    assert failures == []
    assert results[0] == results[1] == results[2]


def test_a_task_that_fits_too_few_records_fails_without_a_word_of_them(work, server, rademacher, dataset):
    lines = (dataset / "train.jsonl").read_text().splitlines()
    (dataset / "train.jsonl").write_text("\n".join([*lines[:6], *['{"SECRET": 1}'] * 594]))
    server.add_job(rademacher, steps=1)
    (job_end,) = work(dataset)
    assert job_end.outcome is Outcome.FAILED
    assert "6 of 600 records fit" in job_end.detail
    (failure,) = server.failures
    assert failure.code == "invalid-dataset"
    assert not any(character.isdigit() for character in failure.detail)
    assert b"SECRET" not in server.received_bytes


def spent_by(runs):
    return epsilon_of([run_spending(PRIVACY, STEPS)] * runs, 1e-5)


def test_another_user_s_name_does_not_escape_the_limit(work, server, clipped, dataset, home):
    home.rules.write_text(f"privacy_limit = {(spent_by(2) + spent_by(3)) / 2}\n")
    for user in ("alice", "bob", "carol"):
        server.add_job(clipped, job_id=f"job-{user}", user=user, privacy=PRIVACY, steps=STEPS)
    server.add_job(clipped, job_id="job-more", user="dave", privacy=PRIVACY, steps=1)
    ends = work(dataset)
    assert [end.outcome for end in ends[:3]] == [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.FAILED]
    assert server.failures[0].code == "privacy-limit-reached"
    assert "limits the privacy of data set 'movies'" in server.failures[0].detail


def test_neither_another_name_of_the_data_nor_a_job_without_privacy_escapes_the_limit(
    enrolled, make, server, clipped, rademacher, dataset
):
    enrolled.rules.write_text(f"privacy_limit = {(spent_by(1) + spent_by(2)) / 2}\n")
    server.add_job(clipped, job_id="job-1", privacy=PRIVACY, steps=STEPS)
    server.add_job(clipped, job_id="job-2", dataset="films", privacy=PRIVACY, steps=STEPS)
    server.add_job(rademacher, job_id="job-3", steps=1)
    daemon = make(enrolled, {"movies": dataset, "films": dataset})
    outcomes = [daemon.run(once=True).outcome for _ in range(3)]
    assert outcomes == [Outcome.COMPLETED, Outcome.FAILED, Outcome.FAILED]
    assert [failure.code for failure in server.failures] == ["privacy-limit-reached"] * 2
    assert "without `privacy`" in server.failures[1].detail


class DyingExecutor:
    """An executor whose process, with the agent's, is killed as training begins."""

    def usage(self):
        raise Killed

    def close(self):
        pass


def charges_of_a_killed_agent(make, home):
    """Runs the agent until training begins; returns what the ledger has then."""
    launcher = SimpleNamespace(name="dying", launch=lambda *_, **__: DyingExecutor())
    with pytest.raises(Killed):
        make(home, launchers=lambda _manifest: launcher).run(once=True)
    return json.loads(home.privacy.read_bytes())["charges"]


def test_a_run_is_charged_before_it_trains_and_once(home, enrolled, make, server, clipped):
    server.add_job(clipped, privacy=PRIVACY, steps=STEPS)
    assert [len(charges_of_a_killed_agent(make, enrolled)) for _ in range(2)] == [1, 1]
    # The run is gone with its secret samples: what is drawn anew is paid for anew.
    shutil.rmtree(home.run("job-1").path)
    assert make(enrolled).run(once=True).outcome is Outcome.COMPLETED
    (first, second) = json.loads(home.privacy.read_bytes())["charges"]
    assert first["spending"] == second["spending"]
    assert first["id"] != second["id"]
    # A job that asks for less noise later pays anew.
    server.jobs.clear()
    server.add_job(clipped, privacy=PRIVACY.model_copy(update={"noise_multiplier": 0.5}), steps=STEPS)
    charges = charges_of_a_killed_agent(make, enrolled)
    assert [charge["spending"]["noise_multiplier"] for charge in charges] == [2.0, 2.0, 0.5]


def test_jobs_that_cannot_start_charge_nothing(home, enrolled, make, server, clipped, dataset, monkeypatch, tmp_path):
    """A submitter cannot use up the limit of a device without a runner, or with one that dies as it loads."""
    broken = tmp_path / "broken"
    broken.mkdir()
    monkeypatch.setenv(RUNNER_VARIABLE, str(tmp_path / "absent"))
    dying = RunnerLauncher(broken)
    (broken / "mobizo-runner").write_text("#!/bin/sh\nexit 7\n")
    (broken / "mobizo-runner").chmod(0o755)
    for number, launchers in enumerate((LauncherSelector(ExecutorName.NATIVE), lambda _manifest: dying)):
        for each in range(2):
            server.add_job(clipped, job_id=f"job-{number}-{each}", privacy=PRIVACY, steps=STEPS)
            daemon = make(enrolled, {"movies": dataset}, launchers=launchers)
            assert daemon.run(once=True).outcome is Outcome.RELEASED
            server.jobs.clear()  # another device has it
    assert not home.privacy.exists()
    server.add_job(clipped, job_id="job-good", privacy=PRIVACY, steps=STEPS)
    assert make(enrolled).run(once=True).outcome is Outcome.COMPLETED
    assert len(json.loads(home.privacy.read_bytes())["charges"]) == 1
