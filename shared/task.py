"""Tasks: how a JSONL record becomes text to learn from, and a metric. `shared.task_records` reads records by one.

A task of kind `choice` chooses between given answers. The other kinds train a model to write: `completion` an answer
after a prompt, `messages` the assistant's turns of a conversation, `text` a whole document, and `preference` the one of
two answers that people preferred. The paper's templates (Table 6, "The prompt template of the datasets") are available
by name, see `shared.task_templates`.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from shared.errors import InvalidTask
from shared.recipe import PREFERENCE_LOSSES, Loss
from shared.strict_model import StrictModel

MAX_TEMPLATE = 8_000  # characters
MAX_TASK = 65_536  # characters of a whole task as JSON
MAX_FIELDS = 64  # fields that a template may name
FieldName = Annotated[str, Field(max_length=100)]
MAX_LABEL = 200  # characters
LabelText = Annotated[str, Field(max_length=MAX_LABEL)]
MappedText = Annotated[str, Field(max_length=1_000)]
TaskName = Annotated[str, Field(max_length=100)]
Kind = Literal["choice", "completion", "messages", "text", "preference"]
Truncate = Literal["head", "tail", "middle"]
TextMetric = Literal["exact_match", "token_f1", "rouge_l"]
Metric = Literal["accuracy", "loss", "preference_accuracy"] | TextMetric
_TEXT_METRICS: tuple[Metric, ...] = ("loss", *get_args(TextMetric))
_METRICS: Mapping[Kind, tuple[Metric, ...]] = {
    "choice": ("accuracy",),
    "completion": _TEXT_METRICS,
    "messages": _TEXT_METRICS,
    "text": ("loss",),
    "preference": ("preference_accuracy",),
}


class Answer(StrictModel):
    """One answer candidate: the continuation text and the label values that mean it."""

    text: str = Field(
        min_length=1,
        max_length=MAX_TEMPLATE,
        description="template of the continuation, with a leading space unless the prompt ends with whitespace",
    )
    labels: tuple[LabelText, ...] = Field(
        min_length=1, max_length=256, description="values of the label field that mean this answer"
    )
    prompt: str | None = Field(
        None,
        max_length=MAX_TEMPLATE,
        description="template of this candidate's own prompt, if candidates have different prompts",
    )


class MappedField(StrictModel):
    """A template field whose value is translated from another field."""

    field: FieldName
    values: dict[LabelText, MappedText] = Field(min_length=1, max_length=1_000)


class Task(StrictModel):
    """How a record becomes text, by its `kind`.

    choice      `prompt` and two or more `answers`, of which the record's label names the right one
    completion  `prompt` and `answer`, both templates; training counts the answer's tokens. A field of `answer` may hold
                a list of texts, all of them right: training uses the first, and a text metric takes the best of them
    messages    a conversation in field `messages_field`, a list of objects with `role` and `content` as OpenAI's API
                and TRL write them, or ShareGPT; training counts the assistant's turns
    text        `answer`, a template, is a document; training counts every token
    preference  `prompt`, `answer` (default {chosen}) and `rejected` (default {rejected}), all templates: training makes
                the answer more likely and the rejected text less likely (recipe loss dpo). Without `rejected`, the
                label field says whether people liked the answer, true or false (loss kto). A template that is one field
                may also name a list of messages, as TRL writes preferences

    What a model is to write ends with the base's end-of-text token. Templates name fields in braces, as in
    `{text} It was`; `{answers.text}` is the field of that name, or `text` of the object in the field `answers`. Literal
    braces are doubled. Nothing else is evaluated.
    """

    name: str = Field(min_length=1, max_length=100, pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    # Fields of other kinds are omitted at their defaults, so that tasks signed before they existed keep their bytes.
    kind: Kind = Field("choice", exclude_if=lambda kind: kind == "choice")
    prompt: str = Field("", max_length=MAX_TEMPLATE)
    answers: tuple[Answer, ...] = Field((), max_length=64, description="of kind choice: at least 2")
    label_field: FieldName = "label"
    mapped: dict[FieldName, MappedField] = Field(default_factory=dict, max_length=MAX_FIELDS)
    metric: Metric = Field(
        "accuracy",
        description="of kind choice: accuracy. Of the others: loss, nats per answer token; of completion and messages "
        "also exact_match, token_f1 or rouge_l, for which the device writes held-out texts after training. Of "
        "preference: preference_accuracy, the share of held-out records whose answers the adapter ranks as people did, "
        "compared with the model before training",
    )
    answer: str | None = Field(
        None,
        max_length=MAX_TEMPLATE,
        exclude_if=lambda answer: answer is None,
        description="template of the text to write: of kind completion, of kind text (default {text}), and of kind "
        "preference (default {chosen})",
    )
    rejected: str | None = Field(
        None,
        max_length=MAX_TEMPLATE,
        exclude_if=lambda rejected: rejected is None,
        description="of kind preference: template of the text that people liked less; null: records have labels",
    )
    messages_field: FieldName | None = Field(
        None,
        exclude_if=lambda field: field is None,
        description="of kind messages: the record's field with the list of messages (default messages)",
    )

    truncate: Truncate = Field(
        "head",
        exclude_if=lambda truncate: truncate == "head",
        description="of kinds choice and completion: the part that a prompt which is too long loses; the text after "
        "the template's last field stays",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_kind(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("kind", "choice") == "choice":
            return values
        defaults: dict[str, Any] = {"metric": "loss"}
        if values.get("kind") == "text":
            defaults["answer"] = "{text}"
        if values.get("kind") == "messages":
            defaults["messages_field"] = "messages"
        if values.get("kind") == "preference":
            pair = {} if values.get("answer") else {"answer": "{chosen}", "rejected": "{rejected}"}
            defaults = {"metric": "preference_accuracy", "prompt": "{prompt}"} | pair
        return defaults | {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _check_fields_of_kind(self) -> Task:
        required = {
            "choice": {"prompt", "answers"},
            "completion": {"prompt", "answer"},
            "messages": {"messages_field"},
            "text": {"answer"},
            "preference": {"prompt", "answer"},
        }[self.kind]
        optional = {"rejected"} if self.kind == "preference" else set()
        for name in ("prompt", "answers", "answer", "messages_field", "rejected"):
            is_present = bool(getattr(self, name))
            if is_present and name not in required | optional:
                raise ValueError(f"a task of kind {self.kind} has no {name}; remove it or set another kind")
            if not is_present and name in required:
                raise ValueError(f"a task of kind {self.kind} needs {name}")
        if self.kind == "choice" and len(self.answers) < 2:
            raise ValueError("a task of kind choice needs at least 2 answers; kind completion has one, `answer`")
        if self.metric not in (metrics := _METRICS[self.kind]):
            raise ValueError(f"metric {self.metric} is not one of kind {self.kind}; choose {' or '.join(metrics)}")
        if self.truncate != "head" and self.kind not in ("choice", "completion"):
            raise ValueError(f"a task of kind {self.kind} has no prompt to truncate; remove truncate")
        if self.kind in ("messages", "preference") and self.mapped:
            raise ValueError(f"a task of kind {self.kind} has no mapped fields; remove mapped")
        return self

    @model_validator(mode="after")
    def _check_templates(self) -> Task:
        for template in self.templates():
            try:
                fields = template_fields(template)
            except InvalidTask as error:
                raise ValueError(error.detail) from error
            if len(fields) > MAX_FIELDS:
                raise ValueError(f"a template names {len(fields)} fields; the limit is {MAX_FIELDS}")
        if len(self.model_dump_json()) > MAX_TASK:
            raise ValueError(f"the task has more than {MAX_TASK} characters as JSON")
        labels = [label for answer in self.answers for label in answer.labels]
        if len(set(labels)) != len(labels):
            raise ValueError("each label may belong to one answer only")
        return self

    @property
    def generates(self) -> bool:
        """Whether the task trains a model to write text, instead of choosing an answer."""
        return self.kind != "choice"

    @property
    def preference_loss(self) -> Loss | None:
        """The recipe's loss of kind preference: dpo with rejected texts, kto with labels; None of other kinds."""
        if self.kind != "preference":
            return None
        return "kto" if self.rejected is None else "dpo"

    def loss_fault(self, loss: Loss) -> str | None:
        """Returns why a recipe's loss does not fit a task of kind preference, or is one of it; None if it fits."""
        own = self.preference_loss
        if own is None and loss in PREFERENCE_LOSSES:
            return f"loss {loss!r} needs a task of kind preference; task {self.name!r} is of kind {self.kind}"
        if own not in (None, loss):
            records = "records with labels" if own == "kto" else "pairs of texts"
            return f"task {self.name!r} has {records} and needs loss {own!r}, not {loss!r}"
        return None

    @property
    def compares_texts(self) -> bool:
        """Whether the metric compares texts that the model writes with the examples' own."""
        return self.metric in get_args(TextMetric)

    def templates(self) -> list[str]:
        """Returns all templates of the task."""
        prompts = [answer.prompt for answer in self.answers if answer.prompt is not None]
        answer_templates = [template for template in (self.answer, self.rejected) if template is not None]
        return [self.prompt, *prompts, *(answer.text for answer in self.answers), *answer_templates]

    @property
    def fixed_answers(self) -> tuple[str, ...] | None:
        """The texts of the answers if they are the same for every record, otherwise None."""
        if self.generates or any(template_fields(answer.text) for answer in self.answers):
            return None
        return tuple(fill_template(answer.text, {}) for answer in self.answers)

    @property
    def shares_prompt(self) -> bool:
        """Whether all candidates continue the same prompt, which the `candidates` loss requires."""
        return all(answer.prompt is None for answer in self.answers)


def template_fields(template: str) -> tuple[str, ...]:
    """Returns the record fields that a template names. Raises InvalidTask for anything but `{field}` and `{a.b}`."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidTask(f"template {template!r}: {error}; write a literal brace twice") from error
    fields = []
    for _, field, spec, conversion in parts:
        if field is None:
            continue
        if not is_field_name(field) or spec or conversion:
            raise InvalidTask(
                f"template {template!r}: only fields such as {{text}} and {{answers.text}} are allowed in braces"
            )
        fields.append(field)
    return tuple(fields)


def is_field_name(name: str) -> bool:
    """Returns whether a template may name such a field: an identifier, or several with dots between them."""
    return all(part.isidentifier() for part in name.split(".")) and "._" not in name


def record_fields(task: Task) -> tuple[str, ...]:
    """Returns the record fields that a task's templates use, in order of first use."""
    template_names = dict.fromkeys(field for template in task.templates() for field in template_fields(template))
    return tuple(dict.fromkeys(task.mapped[field].field if field in task.mapped else field for field in template_names))


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Returns a template with the values of its fields."""
    parts = string.Formatter().parse(template)
    return "".join(literal + (values[field] if field is not None else "") for literal, field, _, _ in parts)
