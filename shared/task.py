"""Tasks: how a JSONL record becomes a prompt, answer candidates and a metric.

The paper's templates (Table 6, "The prompt template of the datasets") are available by name, see
`shared.task_templates`. Users may define their own tasks.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.errors import InvalidDataset, InvalidTask

MOST_TEMPLATE = 8_000  # characters
MOST_TASK = 65_536  # characters of a whole task as JSON
MOST_FIELDS = 64  # fields that a template may name
FieldName = Annotated[str, Field(max_length=100)]
LabelText = Annotated[str, Field(max_length=200)]
MappedText = Annotated[str, Field(max_length=1_000)]
TaskName = Annotated[str, Field(max_length=100)]


class Answer(BaseModel):
    """One answer candidate: the continuation text and the label values that mean it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = Field(
        min_length=1,
        max_length=MOST_TEMPLATE,
        description="template of the continuation, with a leading space unless the prompt ends with whitespace",
    )
    labels: tuple[LabelText, ...] = Field(
        min_length=1, max_length=256, description="values of the label field that mean this answer"
    )
    prompt: str | None = Field(
        None,
        max_length=MOST_TEMPLATE,
        description="template of this candidate's own prompt, if candidates have different prompts",
    )


class Mapped(BaseModel):
    """A template field whose value is translated from another field."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: FieldName
    values: dict[LabelText, MappedText] = Field(min_length=1, max_length=1_000)


class Task(BaseModel):
    """A prompt template over a record's fields and the answers to choose from.

    Templates name fields in braces, as in `{text} It was`. Literal braces are doubled. Nothing else is evaluated.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=100, pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    prompt: str = Field(min_length=1, max_length=MOST_TEMPLATE)
    answers: tuple[Answer, ...] = Field(min_length=2, max_length=64)
    label_field: FieldName = "label"
    mapped: dict[FieldName, Mapped] = Field(default_factory=dict, max_length=MOST_FIELDS)
    metric: Literal["accuracy"] = "accuracy"

    @model_validator(mode="after")
    def _check_templates(self) -> Task:
        for template in self.templates():
            try:
                fields = template_fields(template)
            except InvalidTask as error:
                raise ValueError(error.detail) from error
            if len(fields) > MOST_FIELDS:
                raise ValueError(f"a template names {len(fields)} fields; the limit is {MOST_FIELDS}")
        if len(self.model_dump_json()) > MOST_TASK:
            raise ValueError(f"the task has more than {MOST_TASK} characters as JSON")
        labels = [label for answer in self.answers for label in answer.labels]
        if len(set(labels)) != len(labels):
            raise ValueError("each label may belong to one answer only")
        return self

    def templates(self) -> list[str]:
        """Returns all templates of the task."""
        own = [answer.prompt for answer in self.answers if answer.prompt is not None]
        return [self.prompt, *own, *(answer.text for answer in self.answers)]

    @property
    def fixed_answers(self) -> tuple[str, ...] | None:
        """The texts of the answers if they are the same for every record, otherwise None."""
        if any(template_fields(answer.text) for answer in self.answers):
            return None
        return tuple(_fill(answer.text, {}) for answer in self.answers)

    @property
    def shares_prompt(self) -> bool:
        """Whether all candidates continue the same prompt, which the `candidates` loss requires."""
        return all(answer.prompt is None for answer in self.answers)


@dataclass(frozen=True)
class Choice:
    """One candidate of a record: `answer` continues `prompt`."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Question:
    """The candidates of a record and the index of the correct one."""

    choices: tuple[Choice, ...]
    correct: int


def template_fields(template: str) -> tuple[str, ...]:
    """Returns the record fields that a template names. Raises InvalidTask for anything but plain `{field}`."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidTask(f"template {template!r}: {error}; write a literal brace twice") from error
    fields = []
    for _, field, spec, conversion in parts:
        if field is None:
            continue
        if not field.isidentifier() or spec or conversion:
            raise InvalidTask(f"template {template!r}: only plain fields such as {{text}} are allowed in braces")
        fields.append(field)
    return tuple(fields)


def filled_length(task: Task, record: Mapping[str, Any]) -> int:
    """Returns how many characters the candidates of a record have in total, without building them."""
    lengths: dict[str, int] = {}
    for template in task.templates():
        for field in template_fields(template):
            mapped = task.mapped.get(field)
            if mapped is None:
                lengths[field] = len(_plain(record.get(field, "")))
            else:
                lengths[field] = max(len(text) for text in mapped.values.values())
    total = 0
    for answer in task.answers:
        for template in (answer.prompt or task.prompt, answer.text):
            total += len(template) + sum(lengths[field] for field in template_fields(template))
    return total


def _fill(template: str, values: Mapping[str, str]) -> str:
    parts = string.Formatter().parse(template)
    return "".join(literal + (values[field] if field is not None else "") for literal, field, _, _ in parts)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else str(int(value)) if isinstance(value, bool) else str(value)


def read_question(task: Task, record: Mapping[str, Any], where: str) -> Question:
    """Returns the record's candidates and the index of the correct one.

    `where` names the record (file and line) in errors. Raises InvalidDataset for a missing field or an unknown label.
    """
    needed = {field for template in task.templates() for field in template_fields(template)}
    values: dict[str, str] = {}
    for field in sorted(needed):
        source = task.mapped[field].field if field in task.mapped else field
        if source not in record:
            raise InvalidDataset(f"{where}: field {source!r} is missing, which task {task.name!r} needs")
        value = _plain(record[source])
        if field in task.mapped:
            known = task.mapped[field].values
            if value not in known:
                raise InvalidDataset(
                    f"{where}: field {source!r} is {value!r}; task {task.name!r} accepts {sorted(known)}"
                )
            value = known[value]
        values[field] = value
    if task.label_field not in record:
        raise InvalidDataset(f"{where}: field {task.label_field!r} is missing, which task {task.name!r} needs")
    label = _plain(record[task.label_field])
    correct = next((index for index, answer in enumerate(task.answers) if label in answer.labels), None)
    if correct is None:
        known_labels = [label for answer in task.answers for label in answer.labels]
        raise InvalidDataset(f"{where}: label {label!r} is not one of task {task.name!r}'s labels {known_labels}")
    choices = tuple(
        Choice(_fill(answer.prompt or task.prompt, values), _fill(answer.text, values)) for answer in task.answers
    )
    return Question(choices, correct)
