"""Answers of a personal model to records of its task. Knows no file of the agent's and no command line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from device_agent.personal import PersonalModel
from shared.encoding import Row, encode_question
from shared.errors import BadRequest, InvalidDataset
from shared.task import Task, read_question, template_fields


@dataclass(frozen=True)
class Candidate:
    """One possible answer. probability: among the candidates; log_probability: of its text after its prompt, nats."""

    text: str
    label: str
    probability: float
    log_probability: float


@dataclass(frozen=True)
class Prediction:
    """The candidates of one record in the task's order. truncated: the prompt lost its front, as in training."""

    candidates: tuple[Candidate, ...]
    truncated: bool

    @property
    def best(self) -> Candidate:
        """The likeliest one."""
        return max(self.candidates, key=lambda candidate: candidate.log_probability)


def predict(model: PersonalModel, record: Mapping[str, Any], where: str) -> Prediction:
    """The answers to one record; its label, if it has one, is not looked at. Raises InvalidDataset naming `where`."""
    task = model.task
    unlabelled = dict(record) | {task.label_field: task.answers[0].labels[0]}
    question = read_question(task, unlabelled, where)
    example = encode_question(model.tokenizer, question, model.manifest.recipe, where)
    scores = _scores(model, example.rows)
    shares = np.exp(np.array(scores) - max(scores))
    shares /= shares.sum()
    candidates = tuple(
        Candidate(choice.answer, answer.labels[0], float(share), score)
        for choice, answer, share, score in zip(question.choices, task.answers, shares, scores, strict=True)
    )
    return Prediction(candidates, example.truncated)


def _scores(model: PersonalModel, rows: tuple[Row, ...]) -> list[float]:
    """log P of each row's answer after its prompt, nats; rows of one prompt have it read once."""
    scores: dict[int, float] = {}
    for prompt in dict.fromkeys(row.prompt for row in rows):
        places = [place for place, row in enumerate(rows) if row.prompt == prompt]
        found = model.inference.score(prompt, [rows[place].answer for place in places])
        scores |= dict(zip(places, found, strict=True))
    return [scores[place] for place in range(len(rows))]


def question_fields(task: Task) -> tuple[str, ...]:
    """The record fields that a task's templates ask for, in the order in which they first stand there."""
    named = dict.fromkeys(field for template in task.templates() for field in template_fields(template))
    return tuple(dict.fromkeys(task.mapped[field].field if field in task.mapped else field for field in named))


def record_of(task: Task, text: str | None, fields: list[str]) -> dict[str, str]:
    """A record of a task from `--text` and `--field NAME=VALUE`s. Raises BadRequest naming the fields there are."""
    asked = question_fields(task)
    record: dict[str, str] = {}
    for option in fields:
        name, equals, value = option.partition("=")
        if not equals or name not in asked or name in record:
            raise BadRequest(f"--field {option!r} must be NAME=VALUE, once for each of {', '.join(asked)}")
        record[name] = value
    left = [name for name in asked if name not in record]
    if text is not None:
        if len(left) != 1:
            raise BadRequest(f"task {task.name!r} asks for {', '.join(asked)}: give each as --field NAME=VALUE")
        record[left.pop()] = text
    if left:
        raise BadRequest(f"task {task.name!r} asks for {', '.join(asked)}: --field is missing for {', '.join(left)}")
    return record


def records_of(task: Task, lines: Iterable[str], source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, record) for each line that is not empty: a JSON object, or, where a task has one field, its text.

    Raises InvalidDataset naming the line.
    """
    asked = question_fields(task)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{source}:{number}"
        if line.lstrip().startswith("{") or len(asked) != 1:
            try:
                record = json.loads(line)
            except ValueError as error:
                raise InvalidDataset(f"{where}: the line is not JSON ({error})") from error
            if not isinstance(record, dict):
                raise InvalidDataset(f"{where}: a line must be a JSON object with {', '.join(asked)}")
            yield where, record
        else:
            yield where, {asked[0]: line.rstrip("\r\n")}
