"""JSON models of `POST /v1/score` and `POST /v1/adapters/{name}/classify`.

A row names its adapter as `name` or `name@revision`. A revision is `main` (the default), `v7` or `7`, or at
least 7 digits of a version's `revision`. A row without an adapter uses the base model alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field, model_validator

from shared.errors import BadRequest, InvalidRequest
from shared.recipe import Sha256
from shared.strict_model import StrictModel
from shared.task import Task, TaskName, record_fields
from shared.task_records import MISSING, field_value, template_values

MAX_ROWS = 1024
MAX_ANSWERS = 64  # of one row, as of a task
MAX_NEW_TOKENS = 4096
MAX_TEXT = 1_000_000  # characters of a prompt; a base model's context allows less


AdapterRef = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,95}(@[A-Za-z0-9][A-Za-z0-9._-]{0,95})?$",
        description="`name` or `name@revision`; null: the base model alone",
    ),
]
BaseName = Annotated[str, Field(min_length=1, max_length=200)]


class ScoreRow(StrictModel):
    """A prompt and the answers that may follow it, or a record of the request's task."""

    adapter: AdapterRef | None = None
    prompt: str | None = Field(None, min_length=1, max_length=MAX_TEXT)
    answers: tuple[Annotated[str, Field(min_length=1, max_length=MAX_TEXT)], ...] = Field(
        (), max_length=MAX_ANSWERS, description="texts that follow the prompt, with their leading spaces if any"
    )
    record: dict[Annotated[str, Field(max_length=100)], Any] | None = Field(
        None, max_length=100, description="the fields that the task needs; a label is ignored"
    )

    @model_validator(mode="after")
    def _one_form(self) -> ScoreRow:
        texts = self.prompt is not None or bool(self.answers)
        if texts == (self.record is not None) or (self.prompt is None) != (not self.answers):
            raise ValueError("set prompt and answers, or a record")
        return self


class ScoreRequest(StrictModel):
    """Rows to score together. Their adapters may have different recipes and bases."""

    base: BaseName | None = Field(None, description="a registered base model; null: the base of the adapters")
    base_sha256: Sha256 | None = Field(None, description="refuse any other base model")
    task: TaskName | Task | None = Field(
        None, description="task of rows that are records: name of a built-in task, or a complete task"
    )
    rows: tuple[ScoreRow, ...] = Field(min_length=1, max_length=MAX_ROWS)

    @model_validator(mode="after")
    def _task_of_records(self) -> ScoreRequest:
        if self.task is None and any(row.record is not None for row in self.rows):
            raise ValueError("rows with a record need a task")
        return self


class ClassifyRequest(StrictModel):
    """A record to classify, without its label. The adapter's own task makes the prompt of it."""

    fields: dict[Annotated[str, Field(max_length=100)], Any] = Field(
        max_length=100, description="values of the fields that the adapter's task names; others are not used"
    )

    def record(self, task: Task) -> dict[str, Any]:
        """Returns the record of a task.

        Raises BadRequest for a task that writes text, InvalidRequest naming all missing fields, and InvalidDataset for
        a value that the task does not accept.
        """
        if task.generates:
            raise BadRequest(f"task {task.name!r} writes text and has no labels; use /v1/completions")
        missing = [name for name in record_fields(task) if field_value(self.fields, name) is MISSING]
        if missing:
            errors = [{"field": f"fields.{name}", "message": "missing"} for name in missing]
            needed = ", ".join(record_fields(task))
            raise InvalidRequest(
                f"fields: {', '.join(missing)} missing; the adapter's task {task.name!r} needs {needed}",
                errors=errors,
            )
        template_values(task, self.fields, "fields")
        return self.fields


class ScoredBy(StrictModel):
    """The base model and the adapter version that were used."""

    base: str
    adapter: str | None = None
    version: int | None = None
    revision: str | None = Field(None, description="revision of that version, 40 hexadecimal digits")


class AnswerScore(StrictModel):
    """The score of one answer of a row."""

    text: str
    label: str | None = Field(None, description="first label of the answer, if the row is a record")
    tokens: int = Field(description="number of tokens of the answer")
    log_probability: float = Field(
        description="log-probability of the answer after its prompt, nats: with an adapter that was trained with loss "
        "candidates, among the row's answers; otherwise over the whole vocabulary"
    )
    probability: float = Field(description="among the row's answers")


class RowScore(ScoredBy):
    """The scores of a row's answers, in the order of the request."""

    answers: tuple[AnswerScore, ...]
    best: int = Field(description="index of the most likely answer")


class ScoreResult(StrictModel):
    """The scored rows, in the order of the request."""

    rows: tuple[RowScore, ...]


class LabelScore(StrictModel):
    """A label of the adapter's task. The scores are those of its answer, see `AnswerScore`."""

    label: str
    probability: float
    log_probability: float


class ClassifyResult(ScoredBy):
    """The labels of the adapter's task, the most likely first. version: null on a device."""

    label: str = Field(description="the most likely label")
    labels: tuple[LabelScore, ...]

    @classmethod
    def of(cls, scored_by: ScoredBy, scores: Iterable[tuple[str, float, float]]) -> ClassifyResult:
        """Returns the result. scores: label, probability and log-probability of each, in any order."""
        labels = (LabelScore(label=label, probability=p, log_probability=log_p) for label, p, log_p in scores)
        ranked = tuple(sorted(labels, key=lambda each: -each.log_probability))
        origin = {name: getattr(scored_by, name) for name in ScoredBy.model_fields}
        return cls(label=ranked[0].label, labels=ranked, **origin)
