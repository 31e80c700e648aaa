"""Reads records by a task: their text, their right answer, their conversation, or the answer that people preferred."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from shared.errors import InvalidDataset, InvalidTask
from shared.task import Task, Truncate, fill_template, template_fields

MISSING = object()  # what `field_value` returns of a field that a record lacks or that is null
ROLES = ("system", "user", "assistant", "tool")  # of a conversation's messages
_JSON_NAMES = {dict: "an object", list: "a list"}


class UnknownText(InvalidDataset, code=InvalidDataset.code, title=InvalidDataset.title):
    """A record has a text that its task does not know; correct the record, or the task.

    Unlike the messages of other errors, this one quotes the text.
    """

    def __init__(self, detail: str, field: str) -> None:
        """field: which has the text."""
        super().__init__(detail)
        self.field = field


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


def _to_text(value: Any) -> str:
    """Returns a value as text. A whole number has no decimals: where values are missing, tables write 1 as 1.0."""
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return value if isinstance(value, str) else str(value)


def label_key(label: Any) -> str:
    """Returns what labels that mean the same have in common.

    They differ by white space, characters without a width, case, or `.0` of a number.
    """
    visible = "".join(each for each in _to_text(label) if unicodedata.category(each) != "Cf")
    text = " ".join(unicodedata.normalize("NFC", visible).split()).lower()  # casefold() makes "ß" "ss"
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
                raise UnknownText(
                    f"{location}: field {source!r} is {text!r}; task {task.name!r} accepts {sorted(translations)}",
                    source,
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
        raise UnknownText(
            f"{location}: label {label!r} is not one of task {task.name!r}'s labels {labels}", task.label_field
        )
    choices = tuple(
        _choice(task, answer.prompt or task.prompt, fill_template(answer.text, values), values)
        for answer in task.answers
    )
    return Question(choices, correct)


def _choice(task: Task, template: str, answer: str, values: Mapping[str, str]) -> Choice:
    """Returns a candidate, with the text after the last field of its prompt's template as the prompt's ending."""
    ending = ""
    for literal, field, _, _ in string.Formatter().parse(template):
        ending = ending + literal if field is None else ""
    return Choice(fill_template(template, values), answer, task.truncate, ending)


def read_completion(task: Task, record: Mapping[str, Any], location: str) -> Choice:
    """Returns the text to write and the prompt before it, for a task of kind completion or text (an empty prompt).

    Raises InvalidDataset, naming `location`, for a missing field or an answer that is blank.
    """
    values = template_values(task, record, location)
    answer = fill_template(task.answer or "", values)
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
        return tuple(fill_template(task.answer or "", values | {field: text}) for text in texts)
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
    The names of ShareGPT's files are read too: `from` (`human`, `gpt`) and `value`.

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
        message = _named_as_openai(message)
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


def _named_as_openai(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with `role` and `content`, which ShareGPT's conversations call `from` and `value`."""
    if "role" in message or "from" not in message:
        return message
    names, author = {"from": "role", "value": "content"}, str(message["from"])
    renamed = {names.get(name, name): value for name, value in message.items()}
    return renamed | {"role": {"human": "user", "gpt": "assistant"}.get(author, author)}


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
        answers = tuple(_choice(task, task.prompt, fill_template(template, values), values) for template in templates)
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
