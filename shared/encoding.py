"""From records to a program's inputs: tokenize, place the answers, pack batches in the program's shapes.

Knows the recipe's shapes and a tokenizer; knows no runtime and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.errors import InvalidDataset, InvalidTask
from shared.program import MIN_LENGTH, TOKEN_DTYPE
from shared.recipe import Recipe
from shared.task import Choice, Question, Task, read_question

Arrays = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class Row:
    """One candidate as tokens: the answer's tokens follow the prompt's."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the model reads: all but the answer's last token, which nothing predicts from."""
        return self.prompt + self.answer[:-1]

    @property
    def positions(self) -> range:
        """Where each answer token is predicted."""
        return range(len(self.prompt) - 1, len(self.prompt) - 1 + len(self.answer))


@dataclass(frozen=True)
class Example:
    """A record ready for a program: a row for each candidate, and which is right."""

    rows: tuple[Row, ...]
    correct: int
    truncated: bool
    opening: int = 0  # tokens at the front of every prompt that are never cut off: a BOS, if any

    @property
    def right(self) -> Row:
        """The candidate that is right."""
        return self.rows[self.correct]

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(len(row.tokens) for row in self.rows)

    def shortened(self, most: int) -> Example:
        """The same question with each row in at most `most` tokens, by the front of its prompt.

        Of a prompt at least one token stays besides the opening, even if the row is then longer.
        """
        return replace(self, rows=tuple(_shortened(row, self.opening, most) for row in self.rows))


def _shortened(row: Row, opening: int, most: int) -> Row:
    cut = min(max(len(row.tokens) - most, 0), max(len(row.prompt) - opening - 1, 0))
    return Row(row.prompt[:opening] + row.prompt[opening + cut :], row.answer)


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, record) for each non-empty line; `where` is "file:line". Raises InvalidDataset naming the line."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise InvalidDataset(f"{where}: the line is not JSON ({error})") from error
                if not isinstance(record, dict):
                    raise InvalidDataset(f"{where}: the line is {type(record).__name__}; it must be a JSON object")
                yield where, record
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDataset(f"{path}: cannot be read ({error})") from error


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raises InvalidTask if the tokenizer closes what it encodes with a special token: no answer could follow."""
    if tokenizer.encode("x").special_tokens_mask[-1:] == [1]:
        raise InvalidTask(
            "the base's tokenizer appends a special token to every text; such tokenizers are not supported"
        )


def encode_choice(tokenizer: Tokenizer, choice: Choice) -> Row:
    """Tokens of prompt and answer, split where the prompt's own tokens end."""
    prompt = tokenizer.encode(choice.prompt).ids
    joint = tokenizer.encode(choice.prompt + choice.answer).ids
    if joint[: len(prompt)] == prompt and len(joint) > len(prompt):
        return Row(tuple(prompt), tuple(joint[len(prompt) :]))
    answer = tokenizer.encode(choice.answer, add_special_tokens=False).ids
    return Row(tuple(prompt), tuple(answer))


def _fit(row: Row, opening: tuple[int, ...], recipe: Recipe, where: str) -> tuple[Row, bool]:
    """The row cut to S tokens from the front of its prompt, but for the tokenizer's `opening` (a BOS, if any)."""
    if not row.prompt:
        raise InvalidDataset(f"{where}: the prompt is empty")
    if not row.answer:
        raise InvalidDataset(f"{where}: an answer is empty")
    if len(row.answer) > recipe.answer_length:
        raise InvalidDataset(
            f"{where}: an answer has {len(row.answer)} tokens; the recipe's answer_length is {recipe.answer_length}"
        )
    kept = opening if row.prompt[: len(opening)] == opening else ()
    room = recipe.sequence_length - (len(row.answer) - 1)
    if room <= len(kept):
        raise InvalidDataset(f"{where}: the answer leaves no room for a prompt in {recipe.sequence_length} tokens")
    if len(row.prompt) <= room:
        return row, False
    return Row(kept + row.prompt[len(kept) - room :], row.answer), True


def encode_question(tokenizer: Tokenizer, question: Question, recipe: Recipe, where: str) -> Example:
    """An example in the recipe's shapes. Raises InvalidDataset naming `where` if it cannot fit."""
    if len(question.choices) > recipe.choices:
        raise InvalidDataset(f"{where}: {len(question.choices)} candidates; the recipe's choices is {recipe.choices}")
    opening = tuple(tokenizer.encode("").ids)
    fitted = [_fit(encode_choice(tokenizer, choice), opening, recipe, where) for choice in question.choices]
    rows = tuple(row for row, _ in fitted)
    kept = len(opening) if all(row.prompt[: len(opening)] == opening for row in rows) else 0
    return Example(rows, question.correct, any(cut for _, cut in fitted), kept)


def load_examples(path: Path, task: Task, tokenizer: Tokenizer, recipe: Recipe) -> list[Example]:
    """Every record of a JSONL file as an example. Raises InvalidDataset naming file and line, also if none is there."""
    if recipe.loss == "candidates" and not task.shares_prompt:
        raise InvalidTask(f"task {task.name!r} gives candidates prompts of their own; use loss 'full'")
    check_tokenizer(tokenizer)
    examples = [
        encode_question(tokenizer, read_question(task, record, where), recipe, where)
        for where, record in read_jsonl(path)
    ]
    if not examples:
        raise InvalidDataset(f"{path}: holds no records")
    return examples


def _continuations(example: Example, position: int) -> list[int]:
    """Tokens that may stand at an answer position after the right answer's prefix, the right one first.

    Their softmax, multiplied over positions, is the probability of the answer when decoding is held to the candidates.
    """
    right = example.right.answer
    others = {
        row.answer[position]
        for row in example.rows
        if len(row.answer) > position and row.answer[:position] == right[:position]
    }
    return [right[position], *sorted(others - {right[position]})]


def _packed_length(rows: Iterable[Row], recipe: Recipe, dynamic: bool) -> int:
    """S of a batch of these rows: the longest one's tokens where the program takes any length, else the recipe's."""
    return max((MIN_LENGTH, *(len(row.tokens) for row in rows))) if dynamic else recipe.sequence_length


def pack_step(examples: Sequence[Example], recipe: Recipe, *, dynamic: bool = False) -> Arrays:
    """The data inputs of `step`, for at most E examples (missing rows are masked out, all of them if there is none).

    Loss full: tokens (E, S), positions (E, T), answers (E, T), mask (E, T).
    Loss candidates: tokens (E, S), positions (E, T), choices (E, T, C), choice_mask (E, T, C), mask (E, T).
    dynamic: the manifest's `dynamic_length`; S is then the batch's longest sequence, not the recipe's.
    """
    rows, answer = recipe.effective_batch, recipe.answer_length
    if len(examples) > rows:
        raise ValueError(f"{len(examples)} examples for {rows} rows")
    tokens = np.zeros((rows, _packed_length((example.right for example in examples), recipe, dynamic)), TOKEN_DTYPE)
    positions = np.zeros((rows, answer), TOKEN_DTYPE)
    answers = np.zeros((rows, answer), TOKEN_DTYPE)
    mask = np.zeros((rows, answer), np.float32)
    choices = np.zeros((rows, answer, recipe.choices), TOKEN_DTYPE)
    choice_mask = np.zeros((rows, answer, recipe.choices), np.float32)
    choice_mask[:, :, 0] = 1
    for e, example in enumerate(examples):
        row = example.right
        tokens[e, : len(row.tokens)] = row.tokens
        for t, position in enumerate(row.positions):
            positions[e, t], answers[e, t], mask[e, t] = position, row.answer[t], 1
            if recipe.loss == "candidates":
                allowed = _continuations(example, t)
                choices[e, t, : len(allowed)] = allowed
                choice_mask[e, t, : len(allowed)] = 1
    if recipe.loss == "candidates":
        return tokens, positions, choices, choice_mask, mask
    return tokens, positions, answers, mask


@dataclass(frozen=True)
class ScoreBatch:
    """One call of `score` and how to read its result back.

    inputs: tokens (R, S), positions (R, T), choices (R, T, C). cells: for each example, for each candidate, the
    (row, t, c) entries of the result whose sum is the candidate's log-probability.
    """

    inputs: Arrays
    cells: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]

    def read(self, logprobs: NDArray[np.float32]) -> list[list[float]]:
        """The log-probability of each candidate of each example: the sum over its tokens, from `score`'s (R, T, C)."""
        return [
            [float(sum(float(logprobs[cell]) for cell in cells)) for cells in candidates] for candidates in self.cells
        ]


def score_rows(example: Example) -> list[list[int]]:
    """Candidates grouped into rows: those that read the same tokens share one."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(example.rows):
        groups.setdefault((len(row.prompt), *row.tokens), []).append(index)
    return list(groups.values())


def pack_score(examples: Sequence[Example], recipe: Recipe, *, dynamic: bool = False) -> Iterator[ScoreBatch]:
    """Batches of at most R rows that score every candidate of every example, in order.

    Single-token candidates of one prompt share a row. dynamic: as in `pack_step`; examples of like length should then
    stand together.
    """
    pending: list[Example] = []
    used = 0
    for example in examples:
        need = len(score_rows(example))
        if need > recipe.score_rows:
            raise InvalidDataset(f"{need} candidates of one record do not fit {recipe.score_rows} score rows")
        if used + need > recipe.score_rows:
            yield _score_batch(pending, recipe, dynamic)
            pending, used = [], 0
        pending.append(example)
        used += need
    if pending:
        yield _score_batch(pending, recipe, dynamic)


def _score_batch(examples: Sequence[Example], recipe: Recipe, dynamic: bool) -> ScoreBatch:
    rows, answer = recipe.score_rows, recipe.answer_length
    length = _packed_length((row for example in examples for row in example.rows), recipe, dynamic)
    tokens = np.zeros((rows, length), TOKEN_DTYPE)
    positions = np.zeros((rows, answer), TOKEN_DTYPE)
    choices = np.zeros((rows, answer, recipe.choices), TOKEN_DTYPE)
    cells = []
    r = 0
    for example in examples:
        of_example: list[tuple[tuple[int, int, int], ...]] = [()] * len(example.rows)
        for group in score_rows(example):
            first = example.rows[group[0]]
            tokens[r, : len(first.tokens)] = first.tokens
            positions[r, : len(first.answer)] = list(first.positions)
            for c, index in enumerate(group):
                row = example.rows[index]
                choices[r, : len(row.answer), c] = row.answer
                of_example[index] = tuple((r, t, c) for t in range(len(row.answer)))
            r += 1
        cells.append(tuple(of_example))
    return ScoreBatch((tokens, positions, choices), tuple(cells))


def answer_sizes(task: Task, tokenizer: Tokenizer) -> tuple[int, int]:
    """(T, C): the most tokens of an answer and the number of candidates, for a task whose answers are fixed.

    Raises InvalidTask if they depend on the record.
    """
    texts = task.fixed_answers
    if texts is None:
        raise InvalidTask(
            f"task {task.name!r} takes its answers from the record: set recipe.answer_length and recipe.choices"
        )
    check_tokenizer(tokenizer)
    lengths = [len(encode_choice(tokenizer, Choice("x", text)).answer) for text in texts]
    return max(lengths), len(texts)
