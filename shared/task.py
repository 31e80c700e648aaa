"""Tasks: how a JSONL record becomes text to learn from, and a metric.

A task of kind `choice` chooses between given answers. The other kinds train a model to write: `completion` an answer
after a prompt, `messages` the assistant's turns of a conversation, `text` a whole document, and `preference` the one of
two answers that people preferred. The paper's templates (Table 6, "The prompt template of the datasets") are available
by name, see `shared.task_templates`.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.errors import InvalidDataset, InvalidTask
from shared.recipe import PREFERENCE_LOSSES, Loss

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
MISSING = object()  # what `field_value` returns of a field that a record lacks or that is null
ROLES = ("system", "user", "assistant", "tool")  # of a conversation's messages


_JSON_NAMES = {dict: "an object", list: "a list"}


class Answer(BaseModel):
    """One answer candidate: the continuation text and the label values that mean it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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


class MappedField(BaseModel):
    """A template field whose value is translated from another field."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: FieldName
    values: dict[LabelText, MappedText] = Field(min_length=1, max_length=1_000)


class Task(BaseModel):
    """How a record becomes text, by its `kind`.

    choice      `prompt` and two or more `answers`, of which the record's label names the right one
    completion  `prompt` and `answer`, both templates; training counts the answer's tokens. A field of `answer` may hold
                a list of texts, all of them right: training uses the first, and a text metric takes the best of them
    messages    a conversation in field `messages_field`, a list of objects with `role` and `content` as OpenAI's API
                and TRL write them; training counts the assistant's turns
    text        `answer`, a template, is a document; training counts every token
    preference  `prompt`, `answer` (default {chosen}) and `rejected` (default {rejected}), all templates: training makes
                the answer more likely and the rejected text less likely (recipe loss dpo). Without `rejected`, the
                label field says whether people liked the answer, true or false (loss kto). A template that is one field
                may also name a list of messages, as TRL writes preferences

    What a model is to write ends with the base's end-of-text token. Templates name fields in braces, as in
    `{text} It was`; `{answers.text}` is the field of that name, or `text` of the object in the field `answers`. Literal
    braces are doubled. Nothing else is evaluated.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    truncate: Truncate = "head"
    ending: str = ""  # the prompt's end that stays if the prompt is cut


@dataclass(frozen=True)
class Question:
    """The candidates of a record and the index of the correct one."""

    choices: tuple[Choice, ...]
    correct: int


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


def filled_length(task: Task, record: Mapping[str, Any]) -> int:
    """Returns how many characters the candidates of a record have in total, without building them.

    Returns 0 for a task that writes text.
    """
    lengths: dict[str, int] = {}
    for template in task.templates():
        for field in template_fields(template):
            mapping = task.mapped.get(field)
            if mapping is None:
                value = field_value(record, field)
                lengths[field] = 0 if value is MISSING else len(_to_text(value))
            else:
                lengths[field] = max(len(text) for text in mapping.values.values())
    total = 0
    for answer in task.answers:
        for template in (answer.prompt or task.prompt, answer.text):
            total += len(template) + sum(lengths[field] for field in template_fields(template))
    return total


def _fill(template: str, values: Mapping[str, str]) -> str:
    parts = string.Formatter().parse(template)
    return "".join(literal + (values[field] if field is not None else "") for literal, field, _, _ in parts)


def _to_text(value: Any) -> str:
    """Returns a value as text. A whole number has no decimals: where values are missing, tables write 1 as 1.0."""
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return value if isinstance(value, str) else str(value)


def label_key(label: Any) -> str:
    """Returns what labels that mean the same have in common: they differ by white space, case, or `.0` of a number."""
    text = " ".join(unicodedata.normalize("NFC", _to_text(label)).split()).lower()  # casefold() makes "ß" "ss"
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text)


def field_value(record: Mapping[str, Any], name: str) -> Any:
    """Returns a record's field, or MISSING, which null also is.

    If no field is named `a.b`, it is the field `b` of the object in `a`.
    """
    if name in record:
        return MISSING if record[name] is None else record[name]
    parent, dot, child = name.partition(".")
    parent_value = record.get(parent) if dot else None
    return field_value(parent_value, child) if isinstance(parent_value, dict) else MISSING


def _answer_lists(task: Task, record: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the fields of a completion's `answer` that hold lists."""
    fields = template_fields(task.answer or "") if task.kind == "completion" else ()
    values = {field: field_value(record, field) for field in fields if field not in task.mapped}
    return {field: value for field, value in values.items() if isinstance(value, list)}


def answer_list_fault(task: Task, record: Mapping[str, Any]) -> str | None:
    """Returns why a list of right answers is invalid, without the record's text; None if it is valid or absent."""
    lists = _answer_lists(task, record)
    for field, texts in lists.items():
        if not texts:
            return f"field {field!r} is an empty list; it needs at least one text"
        if not all(isinstance(text, str) and text.strip() for text in texts):
            return f"field {field!r} is a list with something other than texts, or with a blank one"
    if len(lists) > 1:
        return f"fields {' and '.join(map(repr, lists))} are lists; one field of an answer may be a list"
    return None


def template_values(task: Task, record: Mapping[str, Any], location: str) -> dict[str, str]:
    """Returns the texts of all fields that the task's templates name, of a list of texts the first.

    Raises InvalidDataset, naming `location`.
    """
    fields = {field for template in task.templates() for field in template_fields(template)}
    if fault := answer_list_fault(task, record):
        raise InvalidDataset(f"{location}: {fault}")
    first_texts = {field: texts[0] for field, texts in _answer_lists(task, record).items()}
    values: dict[str, str] = {}
    for field in sorted(fields):
        source = task.mapped[field].field if field in task.mapped else field
        value = field_value(record, source)
        if value is MISSING:
            raise InvalidDataset(f"{location}: field {source!r} is missing or null, which task {task.name!r} needs")
        if isinstance(value, (dict, list)) and field not in first_texts:
            raise InvalidDataset(f"{location}: field {source!r} is {_JSON_NAMES[type(value)]}; it must be a text")
        text = first_texts.get(field) or _to_text(value)
        if field in task.mapped:
            translations = task.mapped[field].values
            if text not in translations:
                raise InvalidDataset(
                    f"{location}: field {source!r} is {text!r}; task {task.name!r} accepts {sorted(translations)}"
                )
            text = translations[text]
        values[field] = text
    if values and not any(text.strip() for text in values.values()):
        raise InvalidDataset(f"{location}: the text is blank")
    return values


def _labelled_answer(task: Task, label: str) -> int | None:
    """Returns the index of the answer with a label, or else of the only one with a label of the same `label_key`."""
    for index, answer in enumerate(task.answers):
        if label in answer.labels:
            return index
    key = label_key(label)
    alike = [index for index, answer in enumerate(task.answers) if key in map(label_key, answer.labels)]
    return alike[0] if len(alike) == 1 else None


def read_question(task: Task, record: Mapping[str, Any], location: str) -> Question:
    """Returns the record's candidates and the index of the correct one, for a task of kind choice.

    `location` names the record (file and line) in errors. Raises InvalidDataset for a missing field or an unknown
    label, and InvalidTask for a task of another kind.
    """
    if task.generates:
        raise InvalidTask(f"task {task.name!r} of kind {task.kind} writes text and has no answers to choose from")
    values = template_values(task, record, location)
    value = field_value(record, task.label_field)
    if value is MISSING:
        raise InvalidDataset(
            f"{location}: field {task.label_field!r} is missing or null, which task {task.name!r} needs"
        )
    label = _to_text(value)
    correct = _labelled_answer(task, label)
    if correct is None and isinstance(value, bool):
        correct = _labelled_answer(task, str(value))
    if correct is None:
        labels = [label for answer in task.answers for label in answer.labels]
        raise InvalidDataset(f"{location}: label {label!r} is not one of task {task.name!r}'s labels {labels}")
    choices = tuple(
        _choice(task, answer.prompt or task.prompt, _fill(answer.text, values), values) for answer in task.answers
    )
    return Question(choices, correct)


def _choice(task: Task, template: str, answer: str, values: Mapping[str, str]) -> Choice:
    """Returns a candidate, with the text after the last field of its prompt's template as the prompt's ending."""
    ending = ""
    for literal, field, _, _ in string.Formatter().parse(template):
        ending = ending + literal if field is None else ""
    return Choice(_fill(template, values), answer, task.truncate, ending)


def read_completion(task: Task, record: Mapping[str, Any], location: str) -> Choice:
    """Returns the text to write and the prompt before it, for a task of kind completion or text (an empty prompt).

    Raises InvalidDataset, naming `location`, for a missing field or an answer that is blank.
    """
    values = template_values(task, record, location)
    answer = _fill(task.answer or "", values)
    if not answer.strip():
        raise InvalidDataset(f"{location}: the text to write is blank")
    return _choice(task, task.prompt, answer, values)


def accepted_answers(task: Task, record: Mapping[str, Any], location: str) -> tuple[str, ...]:
    """Returns all texts that are right, for a task of kind completion; the first is `read_completion`'s.

    Raises InvalidDataset as `read_completion`.
    """
    first = read_completion(task, record, location).answer
    values = template_values(task, record, location)
    for field, texts in _answer_lists(task, record).items():  # at most one
        return tuple(_fill(task.answer or "", values | {field: text}) for text in texts)
    return (first,)


def message_text(content: Any) -> str | None:
    """Returns the text of a message's content, a text or a list of text parts; None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return None
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def read_messages(task: Task, record: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    """Returns the conversation of a record as chat templates take it, for a task of kind messages.

    Every message has a role and its content as one text, which is empty for a turn that only calls tools. Of its other
    fields those that are neither null nor an empty list are kept. The role `developer` is the newer name of `system`.

    Raises InvalidDataset, naming `location`, for anything but a list of messages with a known role and a text, and for
    a conversation without a turn of the assistant to learn from.
    """
    field = task.messages_field or ""
    messages = field_value(record, field)
    if not isinstance(messages, list) or not messages:
        raise InvalidDataset(f"{location}: field {field!r} must be a list of messages, which task {task.name!r} needs")
    return _conversation(messages, location)


def _conversation(messages: list[Any], location: str) -> list[dict[str, Any]]:
    """Returns checked messages, as `read_messages`."""
    conversation: list[dict[str, Any]] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise InvalidDataset(f"{location}: message {number} must be an object with role and content, both texts")
        role = "system" if message.get("role") == "developer" else message.get("role")
        text = message_text(message.get("content"))
        if text is None and role == "assistant" and message.get("content") in (None, []) and message.get("tool_calls"):
            text = ""
        if text is None:
            raise InvalidDataset(f"{location}: message {number} must be an object with role and content, both texts")
        if role not in ROLES:
            raise InvalidDataset(f"{location}: message {number} has a role that is none of {', '.join(ROLES)}")
        given = {name: value for name, value in message.items() if value not in (None, [])}
        conversation.append(given | {"role": role, "content": text})
    if not any(map(is_learned, conversation)):
        raise InvalidDataset(f"{location}: the conversation has no turn of the assistant to learn from")
    return conversation


def is_learned(message: Mapping[str, Any]) -> bool:
    """Returns whether training counts a message: a turn of the assistant that its `weight` does not switch off."""
    has_content = message["content"].strip() or message.get("tool_calls")
    return message["role"] == "assistant" and bool(has_content) and message.get("weight") != 0


@dataclass(frozen=True)
class Preference:
    """A record of kind preference: its answers, the preferred or the only one first, each with its prompt.

    answers: texts, or conversations of which only the turns after the prompt count. liked: False if the only answer is
    one that people did not like.
    """

    answers: tuple[Choice, ...] | tuple[list[dict[str, Any]], ...]
    liked: bool = True


def read_preference(task: Task, record: Mapping[str, Any], location: str) -> Preference:
    """Returns the answers of a record, for a task of kind preference.

    Raises InvalidDataset, naming `location` and none of the record's text, for a missing field, a blank text, equal
    answers, and a label that is neither true nor false.
    """
    liked = task.rejected is not None or _is_liked(task, record, location)
    templates = [template for template in (task.answer, task.rejected) if template is not None]
    lists = [_listed(record, template) for template in templates]
    if any(each is not None for each in lists):
        answers: Any = _preferred_conversations(lists, _listed(record, task.prompt), location)
    else:
        values = template_values(task, record, location)
        answers = tuple(_choice(task, task.prompt, _fill(template, values), values) for template in templates)
        if not all(choice.answer.strip() for choice in answers):
            raise InvalidDataset(f"{location}: an answer is blank")
    if len(answers) == 2 and answers[0] == answers[1]:
        raise InvalidDataset(f"{location}: the preferred and the rejected answer are equal; nothing can be learned")
    return Preference(answers, liked)


def _is_liked(task: Task, record: Mapping[str, Any], location: str) -> bool:
    value = field_value(record, task.label_field)
    liked = {"true": True, "1": True, "false": False, "0": False}.get("" if value is MISSING else label_key(value))
    if liked is None:
        raise InvalidDataset(f"{location}: field {task.label_field!r} must be true or false")
    return liked


def _listed(record: Mapping[str, Any], template: str) -> list[Any] | None:
    """Returns the list in the field that is a whole template; None for a text."""
    name = template[1:-1]
    value = field_value(record, name) if template_fields(template) == (name,) else MISSING
    return value if isinstance(value, list) else None


def _preferred_conversations(
    lists: list[list[Any] | None], prompt: list[Any] | None, location: str
) -> tuple[list[dict[str, Any]], ...]:
    """Returns the conversations; without a prompt, of two answers what both begin with is the prompt."""
    answers = [answer or [] for answer in lists]
    if not all(answers):
        raise InvalidDataset(f"{location}: the answers must both be texts or both be lists of messages")
    if prompt is None:
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answers[0], answers[-1], strict=False)))
        begin = min(shared, len(answers[0]) - 1)
        prompt, answers = answers[0][:begin], [answer[begin:] for answer in answers]
    given = [message | {"weight": 0} if isinstance(message, dict) else message for message in prompt]
    return tuple(_conversation([*given, *answer], location) for answer in answers)
