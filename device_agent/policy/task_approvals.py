"""The owner's decisions about which tasks may read which data set, kept in `tasks.json` in the agent's home.

The shipped tasks (`shared.task_templates`) may read every data set unless the owner revokes them. Any other task may
read a data set only after the owner has approved its exact text. A refused task is recorded, so that the owner can read
and approve it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from pydantic import Field

from device_agent.durable import locked, read_document, write_document
from device_agent.errors import PolicyForbids, TaskNotApproved
from shared.canonical import canonical_json, sha256_hex
from shared.errors import BadRequest
from shared.strict_model import StrictModel
from shared.task import Kind, Task
from shared.task_templates import TASKS

MAX_WAITING = 50  # tasks that wait for a decision; more are refused without a record
# Of a task's sha256 on the command line: a submitter can make another task with the same 8 digits in minutes, show the
# owner a harmless one and submit the other.
MIN_DIGITS = 32


class TaskState(StrEnum):
    """What the owner has decided about a task."""

    SHIPPED = "shipped"  # approved by default
    APPROVED = "approved"
    REVOKED = "revoked"
    WAITING = "waiting"


class TaskDecision(StrictModel):
    """The state of one task for one data set."""

    task: Task
    dataset: str
    state: TaskState
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @property
    def sha256(self) -> str:
        """The sha256 of the task's canonical JSON, which identifies it."""
        return task_sha256(self.task)


class _File(StrictModel):
    decisions: list[TaskDecision] = Field([])


LEARNED: dict[Kind, str] = {
    "choice": "",
    "completion": "the text after the prompt",
    "messages": "the assistant's turns of the conversations",
    "text": "the whole text",
    "preference": "answers that people preferred; it also reads answers that people disliked",
}


# A model that learns to write may repeat what it has read, so the owner decides about those tasks.
SHIPPED = {name: task for name, task in TASKS.items() if not task.generates}


def task_sha256(task: Task) -> str:
    """Returns the sha256 of a task's canonical JSON: its name, prompt, answers and fields."""
    return sha256_hex(canonical_json(task.model_dump(mode="json")))


def is_shipped(task: Task) -> bool:
    """Returns whether a task is, in every field, one of the shipped tasks that the owner need not approve."""
    return SHIPPED.get(task.name) == task


def task_lines(task: Task) -> Iterator[str]:
    """Yields a task's text, one line for each part. A stranger wrote it, so `repr` escapes control characters."""
    if task.generates:
        yield f"learns to write  {LEARNED[task.kind]}"
    if task.messages_field is not None:
        yield f"messages  field {task.messages_field!r}"
    elif task.prompt:
        yield f"prompt    {task.prompt!r}"
    if task.answer is not None:
        yield f"text      {task.answer!r}"
    if task.rejected is not None:
        yield f"disliked  {task.rejected!r}"
    elif task.kind == "preference":
        yield f"disliked  the same text where {task.label_field!r} is false"
    for answer in task.answers:
        labels = ", ".join(map(repr, answer.labels))
        yield f"answer    {answer.text!r} for {task.label_field!r} {labels}"
        if answer.prompt is not None:
            yield f"  prompt  {answer.prompt!r}"
    for name, mapped in task.mapped.items():
        values = ", ".join(f"{value!r} as {text!r}" for value, text in mapped.values.items())
        yield f"field     {{{name!r}}} from {mapped.field!r}: {values}"


class TaskApprovals:
    """The decisions in one file. The daemon and the command line may use it at the same time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self, task: Task, dataset: str) -> None:
        """Raises TaskNotApproved unless the task may read the data set; records a new task as waiting.

        Raises PolicyForbids if the file is damaged.
        """
        decision = self._find(self.decisions(), task, dataset)
        if decision is None:
            if is_shipped(task):
                return
            self._record_waiting(task, dataset)
        elif decision.state is TaskState.APPROVED:
            return
        digits = task_sha256(task)[:MIN_DIGITS]
        raise TaskNotApproved(
            f"the owner of this device has not approved task {task.name!r} ({digits}) for data set {dataset!r}; ask "
            f"the owner to run `mobizo-agent task approve {digits} --data {dataset}`, then submit the job again"
        )

    def decisions(self) -> list[TaskDecision]:
        """Returns all decisions and waiting tasks, oldest first. Raises PolicyForbids if the file is damaged."""
        damaged = PolicyForbids(
            f"the owner's decisions in {self._path} cannot be read; repair the file, or remove it and decide again"
        )
        return (read_document(self._path, _File, damaged) or _File()).decisions

    def find(self, name: str) -> Task:
        """Returns the task with these first digits of a sha256, or the shipped task of this name.

        Raises BadRequest if there is none, or more than one.
        """
        if name in TASKS:
            return TASKS[name]
        tasks_by_digest = {decision.sha256: decision.task for decision in self.decisions()}
        tasks_by_digest |= {task_sha256(task): task for task in TASKS.values()}
        matching = [
            task for digest, task in tasks_by_digest.items() if len(name) >= MIN_DIGITS and digest.startswith(name)
        ]
        if len(matching) != 1:
            reason = "several tasks begin with these digits" if matching else "no task has this name or digest"
            raise BadRequest(
                f"{name!r}: {reason}; `mobizo-agent task list` shows the digests, of which at least {MIN_DIGITS} "
                "digits are needed"
            )
        return matching[0]

    def waiting_for(self, task: Task) -> list[str]:
        """Returns the names of the data sets for which a task waits."""
        return [entry.dataset for entry in self.decisions() if entry.task == task and entry.state is TaskState.WAITING]

    def decide(self, task: Task, datasets: Sequence[str], state: TaskState) -> None:
        """Stores a decision durably. A decision that equals the default of a shipped task is removed."""
        with self._lock():
            entries = [entry for entry in self.decisions() if entry.task != task or entry.dataset not in datasets]
            if not (state is TaskState.APPROVED and is_shipped(task)):
                entries += [TaskDecision(task=task, dataset=dataset, state=state) for dataset in datasets]
            write_document(self._path, _File(decisions=entries))

    def _record_waiting(self, task: Task, dataset: str) -> None:
        with self._lock():
            decisions = self.decisions()
            waiting = [entry for entry in decisions if entry.state is TaskState.WAITING]
            if self._find(decisions, task, dataset) is None and len(waiting) < MAX_WAITING:
                new = TaskDecision(task=task, dataset=dataset, state=TaskState.WAITING)
                write_document(self._path, _File(decisions=[*decisions, new]))

    @staticmethod
    def _find(decisions: Sequence[TaskDecision], task: Task, dataset: str) -> TaskDecision | None:
        return next((entry for entry in decisions if entry.dataset == dataset and entry.task == task), None)

    def _lock(self) -> AbstractContextManager[object]:
        return locked(self._path.with_name(f"{self._path.name}.lock"))
