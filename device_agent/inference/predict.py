"""Predicts the answers of a personal model to records of its task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from device_agent.inference.personal_model import PersonalModel
from shared.errors import BadRequest
from shared.scoring import AnswerScore
from shared.task import Task, record_fields
from shared.task_records import read_question
from shared.zo.encoding import Row, encode_question, read_object


@dataclass(frozen=True)
class Prediction:
    """The candidates of one record, in the task's order. truncated: whether the prompt's beginning was cut off, as
    in training.
    """

    candidates: tuple[AnswerScore, ...]
    truncated: bool


def predict(model: PersonalModel, record: Mapping[str, Any], location: str) -> Prediction:
    """Scores the candidates for one record, ignoring its label. Raises InvalidDataset naming `location`."""
    task = model.task
    if task.generates:
        raise BadRequest(
            f"task {task.name!r} writes text and has no answers to choose from; `mobizo-agent chat` and "
            "`mobizo-agent samples` write with the adapter"
        )
    unlabelled = dict(record) | {task.label_field: task.answers[0].labels[0]}
    question = read_question(task, unlabelled, location)
    example = encode_question(model.tokenizer, question, model.manifest.recipe, location)
    scores = _scores(model, example.rows)
    shares = np.exp(np.array(scores) - max(scores))
    shares /= shares.sum()
    candidates = tuple(
        AnswerScore(
            text=choice.answer,
            label=answer.labels[0],
            tokens=len(row.answer),
            log_probability=score,
            probability=float(share),
        )
        for choice, answer, row, share, score in zip(
            question.choices, task.answers, example.rows, shares, scores, strict=True
        )
    )
    return Prediction(candidates, example.truncated)


def _scores(model: PersonalModel, rows: tuple[Row, ...]) -> list[float]:
    """Returns log P of each row's answer after its prompt, nats; rows with the same prompt share one pass over it."""
    restrict = model.manifest.recipe.loss == "candidates"
    scores: dict[int, float] = {}
    for prompt in dict.fromkeys(row.prompt for row in rows):
        indices = [index for index, row in enumerate(rows) if row.prompt == prompt]
        answers = [rows[index].answer for index in indices]
        log_probabilities = model.inference.score(prompt, answers, restrict=restrict)
        scores |= dict(zip(indices, log_probabilities, strict=True))
    return [scores[index] for index in range(len(rows))]


def record_of(task: Task, text: str | None, fields: list[str]) -> dict[str, str]:
    """Builds a record from `--text` and `--field NAME=VALUE`. Raises BadRequest naming the task's fields."""
    names = record_fields(task)
    record: dict[str, str] = {}
    for option in fields:
        name, equals, value = option.partition("=")
        if not equals or name not in names or name in record:
            raise BadRequest(f"--field {option!r} must be NAME=VALUE, once for each of {', '.join(names)}")
        record[name] = value
    missing = [name for name in names if name not in record]
    if text is not None:
        if len(missing) != 1:
            raise BadRequest(f"task {task.name!r} has the fields {', '.join(names)}: set each with --field NAME=VALUE")
        record[missing.pop()] = text
    if missing:
        raise BadRequest(
            f"task {task.name!r} has the fields {', '.join(names)}: --field is missing for {', '.join(missing)}"
        )
    return record


def records_of(task: Task, lines: Iterable[str], source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (location, record) for each non-empty line: a JSON object, or the text of a task with one field.

    Raises InvalidDataset naming the line.
    """
    names = record_fields(task)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        location = f"{source}:{number}"
        if line.lstrip().startswith("{") or len(names) != 1:
            yield location, read_object(line, location)
        else:
            yield location, {names[0]: line.rstrip("\r\n")}
