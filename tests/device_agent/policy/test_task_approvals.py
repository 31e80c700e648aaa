"""The owner's decisions about tasks."""

import threading

import pytest

from device_agent.errors import PolicyForbids, TaskNotApproved
from device_agent.policy import task_approvals
from device_agent.policy.task_approvals import MIN_DIGITS, TaskApprovals, TaskState, is_shipped, task_lines, task_sha256
from shared.errors import BadRequest
from shared.task import Answer, MappedField, Task
from shared.task_templates import TASKS, named_task


def task_of(prompt="{text} Urgent?", name="urgency"):
    answers = (Answer(text=" no", labels=("0",)), Answer(text=" yes", labels=("1",)))
    return Task(name=name, prompt=prompt, answers=answers)


def refuse(approvals, task, dataset="tickets", words=None):
    with pytest.raises(TaskNotApproved, match=words):
        approvals.check(task, dataset)


@pytest.fixture
def approvals(tmp_path):
    return TaskApprovals(tmp_path / "tasks.json")


@pytest.mark.parametrize("name", TASKS)
def test_shipped_tasks_that_choose_may_read_every_data_set(approvals, name):
    if name in ("squad", "drop"):
        refuse(approvals, named_task(name), "anything")
    else:
        approvals.check(named_task(name), "anything")
        assert approvals.decisions() == []


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "{text} It was {secret}"},
        {"label_field": "pin"},
        {"answers": (*named_task("sst2").answers[:1], Answer(text=" great", labels=("positive", "1", "2")))},
        {"mapped": {"text": MappedField(field="pin", values={"1": "a"})}},
    ],
)
def test_the_name_of_a_shipped_task_is_not_enough(approvals, change):
    task = named_task("sst2").model_copy(update=change)
    assert not is_shipped(task)
    refuse(approvals, task, "movies")


def test_a_task_waits_and_is_approved_for_one_data_set(approvals):
    task = task_of()
    for _ in range(2):
        refuse(approvals, task, words=f"task approve {task_sha256(task)[:MIN_DIGITS]} --data tickets")
    (entry,) = approvals.decisions()
    assert (entry.task, entry.dataset, entry.state) == (task, "tickets", TaskState.WAITING)
    approvals.decide(task, approvals.waiting_for(task), TaskState.APPROVED)
    TaskApprovals(approvals._path).check(task, "tickets")
    refuse(approvals, task, "letters")
    refuse(approvals, task_of("{text} Urgent??"))
    approvals.decide(task, ["tickets"], TaskState.REVOKED)
    refuse(approvals, task)


def test_no_flood_of_tasks_fills_the_file_or_hides_those_before(approvals, monkeypatch):
    monkeypatch.setattr(task_approvals, "MAX_WAITING", 3)
    for number in range(5):
        refuse(approvals, task_of(f"{{text}} {number}"))
    assert [entry.task.prompt for entry in approvals.decisions()] == ["{text} 0", "{text} 1", "{text} 2"]


def test_a_task_is_found_by_digits_and_not_by_a_name_that_a_stranger_chose(approvals):
    task = task_of()
    refuse(approvals, task)
    assert approvals.find(task_sha256(task)[:MIN_DIGITS]) == task
    assert approvals.find("sst2") == named_task("sst2")
    # Two texts with equal first digits take the square root of their number in attempts.
    assert 16 ** (MIN_DIGITS // 2) >= 2**64
    for name in ("urgency", task_sha256(task)[: MIN_DIGITS - 1], task_sha256(task)[:8], "0" * MIN_DIGITS, ""):
        with pytest.raises(BadRequest, match="task list"):
            approvals.find(name)


def test_a_task_s_text_cannot_steer_the_terminal():
    hostile = task_of('{text}\x1b[2K\r"safe"\u202e\n')
    assert next(iter(task_lines(hostile))) == r"""prompt    '{text}\x1b[2K\r"safe"\u202e\n'"""
    assert next(iter(task_lines(task_of("{text} Грубо?")))).endswith("'{text} Грубо?'")


def test_a_damaged_file_approves_nothing(approvals, tmp_path):
    (tmp_path / "tasks.json").write_text("{")
    for task in (task_of(), named_task("sst2")):
        with pytest.raises(PolicyForbids, match="cannot be read"):
            approvals.check(task, "tickets")


def test_a_command_and_the_daemon_may_write_at_once(approvals):
    tasks = [task_of(f"{{text}} {number}") for number in range(8)]
    threads = [threading.Thread(target=refuse, args=(approvals, task)) for task in tasks]
    for thread in threads:
        thread.start()
    for number in range(8):
        approvals.decide(task_of(f"{{text}} approved {number}"), ["tickets"], TaskState.APPROVED)
    for thread in threads:
        thread.join()
    states = [entry.state for entry in approvals.decisions()]
    assert states.count(TaskState.WAITING) == states.count(TaskState.APPROVED) == 8


def test_the_owner_reads_that_a_task_takes_disliked_answers():
    text = "\n".join(task_lines(Task(name="style", kind="preference")))
    assert "it also reads answers that people disliked" in text
    assert "disliked  '{rejected}'" in text
    labelled = "\n".join(task_lines(Task(name="thumbs", kind="preference", answer="{completion}")))
    assert "disliked  the same text where 'label' is false" in labelled
