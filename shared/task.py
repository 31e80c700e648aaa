"""A task: how a JSONL record becomes prompt, answer candidates and metric.

The paper's templates (Table "prompt template of the datasets") ship by name, in `shared/tasks.py`; users add
their own. Knows no tokenizer and no files.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.errors import InvalidDataset, InvalidTask


class Answer(BaseModel):
    """One answer candidate: the text the model should continue with, and the label values that mean it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = Field(
        min_length=1, description="template of the continuation, with its leading space if the prompt ends none"
    )
    labels: tuple[str, ...] = Field(min_length=1, description="values of the label field that mean this answer")
    prompt: str | None = Field(None, description="template of this candidate's own prompt, where they differ")


class Mapped(BaseModel):
    """A template field that is another field's value, translated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: str
    values: dict[str, str] = Field(min_length=1)


class Task(BaseModel):
    """A prompt template over a record's fields and the answers to choose from.

    Templates name fields in braces, `{text} It was`; braces themselves are doubled. Nothing else is evaluated.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=100, pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    prompt: str = Field(min_length=1)
    answers: tuple[Answer, ...] = Field(min_length=2, max_length=64)
    label_field: str = "label"
    mapped: dict[str, Mapped] = Field(default_factory=dict)
    metric: Literal["accuracy"] = "accuracy"

    @model_validator(mode="after")
    def _check_templates(self) -> Task:
        for template in self.templates():
            try:
                template_fields(template)
            except InvalidTask as error:
                raise ValueError(error.detail) from error
        labels = [label for answer in self.answers for label in answer.labels]
        if len(set(labels)) != len(labels):
            raise ValueError("each label may belong to one answer only")
        return self

    def templates(self) -> list[str]:
        """Every template of the task."""
        own = [answer.prompt for answer in self.answers if answer.prompt is not None]
        return [self.prompt, *own, *(answer.text for answer in self.answers)]

    @property
    def fixed_answers(self) -> tuple[str, ...] | None:
        """The answers' texts if they are the same for every record, else None."""
        if any(template_fields(answer.text) for answer in self.answers):
            return None
        return tuple(_fill(answer.text, {}) for answer in self.answers)

    @property
    def shares_prompt(self) -> bool:
        """Whether all candidates continue one prompt, as the `candidates` loss needs."""
        return all(answer.prompt is None for answer in self.answers)


@dataclass(frozen=True)
class Choice:
    """One candidate of one record: `answer` continues `prompt`."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Question:
    """A record seen through a task: its candidates, and which of them is right."""

    choices: tuple[Choice, ...]
    correct: int


def template_fields(template: str) -> tuple[str, ...]:
    """The record fields a template names. Raises InvalidTask on anything but plain `{field}`."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidTask(f"template {template!r}: {error}; write a literal brace twice") from error
    fields = []
    for _, field, spec, conversion in parts:
        if field is None:
            continue
        if not field.isidentifier() or spec or conversion:
            raise InvalidTask(f"template {template!r}: only plain fields such as {{text}} may stand in braces")
        fields.append(field)
    return tuple(fields)


def _fill(template: str, values: Mapping[str, str]) -> str:
    parts = string.Formatter().parse(template)
    return "".join(literal + (values[field] if field is not None else "") for literal, field, _, _ in parts)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else str(int(value)) if isinstance(value, bool) else str(value)


def read_question(task: Task, record: Mapping[str, Any], where: str) -> Question:
    """The record's candidates and the index of the right one.

    `where` names the record (file and line) for errors. Raises InvalidDataset for a missing field or unknown label.
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
                    f"{where}: field {source!r} is {value!r}; task {task.name!r} knows {sorted(known)}"
                )
            value = known[value]
        values[field] = value
    if task.label_field not in record:
        raise InvalidDataset(f"{where}: field {task.label_field!r} is missing, which task {task.name!r} needs")
    label = _plain(record[task.label_field])
    correct = next((index for index, answer in enumerate(task.answers) if label in answer.labels), None)
    if correct is None:
        known_labels = [label for answer in task.answers for label in answer.labels]
        raise InvalidDataset(f"{where}: label {label!r} is none of task {task.name!r}'s {known_labels}")
    choices = tuple(
        Choice(_fill(answer.prompt or task.prompt, values), _fill(answer.text, values)) for answer in task.answers
    )
    return Question(choices, correct)
