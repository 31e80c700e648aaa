"""The owner's file as a data set of the device, and a task for it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from device_agent.cli.tasks import read_task
from device_agent.datasets.build import Addition, FieldMap, Mode, add
from device_agent.datasets.formats import Source, open_source
from device_agent.datasets.splits import DEFAULT_SEED, SplitRule
from device_agent.datasets.store import DatasetStore
from device_agent.datasets.task_check import TaskCheck
from device_agent.home import AgentHome
from device_agent.policy.task_approvals import TaskApprovals, TaskState
from shared.errors import BadRequest, InvalidDataset
from shared.task import Answer, Task
from shared.task_templates import named_task

TEXT, LABEL = "text", "label"
PROMPT, ANSWER, MESSAGES = "prompt", "answer", "messages"
SPLITS = (SplitRule().text, "80/20", "100")  # the first one whose splits all have records is used
MOST_LABELS = 16  # of a suggested task
LEAST_RECORDS = 2  # of each label


@dataclass(frozen=True)
class CheckedData:
    """A checked file of records and its task. suggested: whether the task was derived from the file's columns."""

    addition: Addition
    task: Task
    suggested: bool
    check: TaskCheck

    def save(self, home: AgentHome) -> None:
        """Copies the records to the device's home and approves the task, because the caller is the device's owner."""
        home.create()
        add(DatasetStore(home.data), self.addition)
        TaskApprovals(home.tasks).decide(self.task, [self.addition.name], TaskState.APPROVED)


def slug(text: str) -> str:
    """Returns a valid name for data sets, adapters and bases, derived from any text."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "data"


def check_data(path: Path, pairs: list[str], task: str | None) -> CheckedData:
    """Reads a file and writes nothing. task: a file, a shipped task's name, or None to suggest one.

    Raises BadRequest for options that are wrong, InvalidDataset for a file that cannot be used.
    """
    source, fields, name = open_source(path, None, None, None), FieldMap.parse(pairs), slug(path.stem)
    if task is None:
        task_definition = suggest_task(name, source, fields)
    else:
        task_definition = read_task(Path(task)) if Path(task).is_file() else named_task(task)
    first_error: InvalidDataset | None = None
    for split in SPLITS:
        rule = SplitRule.parse(split, DEFAULT_SEED)
        addition = Addition(name, [source], fields, rule, Mode.REPLACE, task_definition)
        try:
            check = add(DatasetStore(path.parent), replace(addition, dry_run=True)).check
        except InvalidDataset as error:
            first_error = first_error or error
            continue
        assert check is not None  # noqa: S101  # there is a task
        return CheckedData(addition, task_definition, task is None, check)
    assert first_error is not None  # noqa: S101
    raise first_error


def suggest_task(name: str, source: Source, fields: FieldMap) -> Task:
    """Returns the task that the first record's fields suggest.

    Conversations for `messages`, completions for `prompt` and `answer`, whole texts for `text` alone, and a choice
    between the labels for `text` with `label`. Raises BadRequest for other fields.
    """
    with source.path.open("rb") as file:
        location, record = next(iter(source.records(file)), (str(source.path), {}))
        fields.check(location, record)
        values = fields.apply(record)
    if isinstance(values.get(MESSAGES), list):
        return Task(name=name, kind="messages")
    if PROMPT in values and ANSWER in values:
        return Task(name=name, kind="completion", prompt=f"{{{PROMPT}}}\n", answer=f"{{{ANSWER}}}")
    if TEXT not in values:
        raise BadRequest(
            f"{source.path} has no column {TEXT!r} (its columns: {', '.join(record)}); name it with --map "
            f"{TEXT}=COLUMN, and with --map {LABEL}=COLUMN what a model is to choose; columns "
            f"{PROMPT!r} and {ANSWER!r}, or a list {MESSAGES!r}, teach it to answer; or give a task with --task"
        )
    return _suggest_choice(name, source, fields) if LABEL in values else Task(name=name, kind="text")


def _suggest_choice(name: str, source: Source, fields: FieldMap) -> Task:
    """Returns a choice task whose answers are the file's labels. Raises BadRequest for too few or too many labels.

    The name of the label's column ends the prompt.
    """
    labels: Counter[str] = Counter()
    with source.path.open("rb") as file:
        for _, record in source.records(file):
            label = fields.apply(record).get(LABEL)
            text = str(int(label)) if isinstance(label, bool) else str(label)
            if label is not None and text.strip():
                labels[text] += 1
    frequent = sorted(text for text, count in labels.items() if count >= LEAST_RECORDS)
    if not 2 <= len(frequent) <= MOST_LABELS:
        raise BadRequest(
            f"column {fields.columns.get(LABEL, LABEL)!r} of {source.path} has {len(frequent)} different labels of "
            f"{LEAST_RECORDS} records or more; a task is suggested for 2 to {MOST_LABELS}; give one with --task"
        )
    cue = fields.columns.get(LABEL, LABEL).strip().replace("{", "{{").replace("}", "}}")
    answers = tuple(
        Answer(text=" " + text.strip().replace("{", "{{").replace("}", "}}"), labels=(text,)) for text in frequent
    )
    return Task(name=name, prompt=f"{{{TEXT}}}\n{cue}:", answers=answers)
