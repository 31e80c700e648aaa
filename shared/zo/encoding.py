"""Turns records into a program's inputs: tokenization, placement of the answers and packing into the program's shapes.

Three different quantities are called a loss. All are in nats, and all start from the negative log-likelihood (NLL) of
an answer token: over the whole vocabulary with recipe loss `full`, over the possible continuations with `candidates`.

    token mean    the training loss of one path: the mean NLL over all answer tokens of the E examples together, so a
                  long answer weighs more. `step` returns it for 2q paths; `Progress.loss` is the mean over the paths.
    example mean  the mean NLL over one example's own answer tokens. Private steps clip differences of it per example.
    summed nats   -log P(answer | prompt), the sum over the answer's tokens, over the whole vocabulary, as `score`
                  gives it. It ranks candidates; `Evaluation.loss` is its mean over the examples of a split.

A step calls the token mean at B + eps z `loss_plus` and at B - eps z `loss_minus`. Their quotient
(loss_plus - loss_minus) / (2 eps) is the `projected_gradient` along z (Algorithm 1).
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
from shared.program_inputs import MIN_LENGTH, TOKEN_DTYPE
from shared.recipe import Recipe
from shared.task import Choice, Question, Task, read_question

Arrays = tuple[NDArray[Any], ...]
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """The tokens of one candidate: the prompt's, followed by the answer's.

    counted: ascending positions in the answer whose tokens are trained on and scored; None: all. A conversation's
    `answer` starts with the assistant's first turn; later turns of other roles do not count.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    counted: tuple[int, ...] | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that the model reads: all except the answer's last one."""
        return self.prompt + self.answer[:-1]

    @property
    def targets(self) -> list[tuple[int, int]]:
        """The (position, token) pairs that count: the logits at the position predict the answer's token."""
        positions = range(len(self.answer)) if self.counted is None else self.counted
        return [(len(self.prompt) - 1 + position, self.answer[position]) for position in positions]


@dataclass(frozen=True)
class Example:
    """An encoded record: one row for each candidate, and the index of the correct one."""

    rows: tuple[Row, ...]
    correct: int
    truncated: bool

    @property
    def correct_row(self) -> Row:
        """The row of the correct candidate."""
        return self.rows[self.correct]

    @property
    def length(self) -> int:
        """Number of tokens of the longest row."""
        return max(len(row.tokens) for row in self.rows)


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (location, record) for each non-empty line of a JSONL file; `location` is "file:line".

    Raises InvalidDataset, naming the line, for a line that is not a JSON object, or if the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                location = f"{path}:{number}"
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise InvalidDataset(f"{location}: the line is not JSON ({error})") from error
                if not isinstance(record, dict):
                    raise InvalidDataset(f"{location}: the line is {type(record).__name__}; it must be a JSON object")
                yield location, record
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDataset(f"{path}: cannot be read ({error})") from error


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raises InvalidTask if the tokenizer appends a special token to every text, after which no answer could follow."""
    if tokenizer.encode("x").special_tokens_mask[-1:] == [1]:
        raise InvalidTask(
            "the base's tokenizer appends a special token to every text; such tokenizers are not supported"
        )


def token_ids(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
    """Returns the tokens of a text; other threads run meanwhile. special: with the tokenizer's own tokens such as BOS.

    `Tokenizer.encode` keeps the interpreter's lock: the tokenization of a text of a million characters would stop every
    other thread, also an event loop, for up to seconds. `encode_batch` releases it.
    """
    ids: list[int] = tokenizer.encode_batch([text], add_special_tokens=special)[0].ids
    return ids


def encode_choice(tokenizer: Tokenizer, choice: Choice) -> Row:
    """Tokenizes prompt and answer together and splits the tokens where the prompt ends.

    If the prompt's tokens are not a prefix of the joint tokens, both texts are tokenized separately.
    """
    prompt = token_ids(tokenizer, choice.prompt)
    joint = token_ids(tokenizer, choice.prompt + choice.answer)
    if joint[: len(prompt)] == prompt and len(joint) > len(prompt):
        return Row(tuple(prompt), tuple(joint[len(prompt) :]))
    answer = token_ids(tokenizer, choice.answer, special=False)
    return Row(tuple(prompt), tuple(answer))


def fit_row(row: Row, bos_tokens: tuple[int, ...], recipe: Recipe, location: str) -> tuple[Row, bool]:
    """Returns the row cut to S tokens from the front of its prompt, and whether it was cut. `bos_tokens` are kept."""
    if not row.prompt:
        raise InvalidDataset(f"{location}: the prompt is empty")
    if not row.answer:
        raise InvalidDataset(f"{location}: an answer is empty")
    if len(row.targets) > recipe.answer_length:
        raise InvalidDataset(
            f"{location}: an answer has {len(row.targets)} tokens; the recipe's answer_length is {recipe.answer_length}"
        )
    bos = bos_tokens if row.prompt[: len(bos_tokens)] == bos_tokens else ()
    max_prompt_length = recipe.sequence_length - (len(row.answer) - 1)
    if max_prompt_length <= len(bos):
        raise InvalidDataset(f"{location}: the answer leaves no room for a prompt in {recipe.sequence_length} tokens")
    if len(row.prompt) <= max_prompt_length:
        return row, False
    return replace(row, prompt=bos + row.prompt[len(bos) - max_prompt_length :]), True


def encode_question(tokenizer: Tokenizer, question: Question, recipe: Recipe, location: str) -> Example:
    """Returns an example in the recipe's shapes. Raises InvalidDataset, naming `location`, if it does not fit."""
    if len(question.choices) > recipe.choices:
        raise InvalidDataset(
            f"{location}: {len(question.choices)} candidates; the recipe's choices is {recipe.choices}"
        )
    bos_tokens = tuple(tokenizer.encode("").ids)
    fitted = [fit_row(encode_choice(tokenizer, choice), bos_tokens, recipe, location) for choice in question.choices]
    rows = tuple(row for row, _ in fitted)
    return Example(rows, question.correct, any(truncated for _, truncated in fitted))


def check_task(task: Task, tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Raises InvalidTask if recipe, tokenizer and task do not fit together, whatever the records are."""
    if recipe.loss == "candidates" and task.generates:
        raise InvalidTask(f"task {task.name!r} writes text and has no candidates; use loss 'full'")
    if recipe.loss == "candidates" and not task.shares_prompt:
        raise InvalidTask(f"task {task.name!r} has a separate prompt for each candidate; use loss 'full'")
    if len(task.answers) > recipe.choices:
        raise InvalidTask(
            f"task {task.name!r} has {len(task.answers)} answers, but the recipe's choices is {recipe.choices}"
        )
    check_tokenizer(tokenizer)


def load_examples(path: Path, task: Task, tokenizer: Tokenizer, recipe: Recipe) -> list[Example]:
    """Returns every record of a JSONL file as an example.

    Raises InvalidDataset, naming file and line, for a bad record or an empty file, and InvalidTask if recipe and task
    do not fit together.
    """
    check_task(task, tokenizer, recipe)
    examples = [
        encode_question(tokenizer, read_question(task, record, location), recipe, location)
        for location, record in read_jsonl(path)
    ]
    if not examples:
        raise InvalidDataset(f"{path}: the file contains no records")
    return examples


def _continuations(example: Example, position: int) -> list[int]:
    """Returns the tokens that may follow the correct answer's prefix at a position, the correct one first.

    The product over positions of their softmax is the probability of the answer when decoding is limited to the
    candidates.
    """
    answer = example.correct_row.answer
    alternatives = {
        row.answer[position]
        for row in example.rows
        if len(row.answer) > position and row.answer[:position] == answer[:position]
    }
    return [answer[position], *sorted(alternatives - {answer[position]})]


def _packed_length(rows: Iterable[Row], recipe: Recipe, dynamic: bool) -> int:
    """Returns S of a batch: the longest row's tokens if the program has a dynamic length, otherwise the recipe's S."""
    return max((MIN_LENGTH, *(len(row.tokens) for row in rows))) if dynamic else recipe.sequence_length


def pack_step(examples: Sequence[Example], recipe: Recipe, *, dynamic: bool = False) -> Arrays:
    """Returns the data inputs of `step` for at most E examples. Rows without an example are masked out.

    Loss full: tokens (E, S), positions (E, T), answers (E, T), mask (E, T).
    Loss candidates: tokens (E, S), positions (E, T), choices (E, T, C), choice_mask (E, T, C), mask (E, T).
    dynamic: the manifest's `dynamic_length`; S is then the length of the batch's longest sequence.

    Raises ValueError for more than E examples.
    """
    rows, answer = recipe.effective_batch, recipe.answer_length
    if len(examples) > rows:
        raise ValueError(f"{len(examples)} examples for {rows} rows")
    tokens = np.zeros(
        (rows, _packed_length((example.correct_row for example in examples), recipe, dynamic)), TOKEN_DTYPE
    )
    positions = np.zeros((rows, answer), TOKEN_DTYPE)
    answers = np.zeros((rows, answer), TOKEN_DTYPE)
    mask = np.zeros((rows, answer), np.float32)
    choices = np.zeros((rows, answer, recipe.choices), TOKEN_DTYPE)
    choice_mask = np.zeros((rows, answer, recipe.choices), np.float32)
    choice_mask[:, :, 0] = 1
    for e, example in enumerate(examples):
        row = example.correct_row
        tokens[e, : len(row.tokens)] = row.tokens
        for t, (position, token) in enumerate(row.targets):
            positions[e, t], answers[e, t], mask[e, t] = position, token, 1
            if recipe.loss == "candidates":
                allowed = _continuations(example, t)
                choices[e, t, : len(allowed)] = allowed
                choice_mask[e, t, : len(allowed)] = 1
    if recipe.loss == "candidates":
        return tokens, positions, choices, choice_mask, mask
    return tokens, positions, answers, mask


@dataclass(frozen=True)
class ScoreBatch:
    """The inputs of one `score` call and the positions of the results.

    inputs: tokens (R, S), positions (R, T), choices (R, T, C). texts: the tokens of the first rows; the other rows are
    blank. cells: for each example, for each candidate, the (row, t, c) entries of the result whose sum is the
    candidate's log-probability.
    """

    inputs: Arrays
    texts: tuple[Tokens, ...]
    cells: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]

    def read(self, logprobs: NDArray[np.float32]) -> list[list[float]]:
        """Returns the log-probability (nats) of each candidate of each example from `score`'s result (R, T, C)."""
        return [
            [float(sum(float(logprobs[cell]) for cell in cells)) for cells in candidates] for candidates in self.cells
        ]


def score_rows(example: Example) -> list[list[int]]:
    """Groups the indices of the candidates into rows. Candidates with the same tokens share a row."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(example.rows):
        groups.setdefault((len(row.prompt), *row.tokens), []).append(index)
    return list(groups.values())


def pack_score(examples: Sequence[Example], recipe: Recipe, *, dynamic: bool = False) -> Iterator[ScoreBatch]:
    """Yields batches of at most R rows that score every candidate of every example, in order.

    Single-token candidates of one prompt share a row. dynamic: as in `pack_step`; examples of similar length should
    then be adjacent. Raises InvalidDataset if the candidates of one example do not fit into R rows.
    """
    pending: list[Example] = []
    used_rows = 0
    for example in examples:
        needed_rows = len(score_rows(example))
        if needed_rows > recipe.score_rows:
            raise InvalidDataset(f"{needed_rows} candidates of one record do not fit {recipe.score_rows} score rows")
        if used_rows + needed_rows > recipe.score_rows:
            yield _score_batch(pending, recipe, dynamic)
            pending, used_rows = [], 0
        pending.append(example)
        used_rows += needed_rows
    if pending:
        yield _score_batch(pending, recipe, dynamic)


def _score_batch(examples: Sequence[Example], recipe: Recipe, dynamic: bool) -> ScoreBatch:
    rows, answer = recipe.score_rows, recipe.answer_length
    length = _packed_length((row for example in examples for row in example.rows), recipe, dynamic)
    tokens = np.zeros((rows, length), TOKEN_DTYPE)
    positions = np.zeros((rows, answer), TOKEN_DTYPE)
    choices = np.zeros((rows, answer, recipe.choices), TOKEN_DTYPE)
    cells, texts = [], []
    r = 0
    for example in examples:
        example_cells: list[tuple[tuple[int, int, int], ...]] = [()] * len(example.rows)
        for group in score_rows(example):
            first = example.rows[group[0]]
            texts.append(first.tokens)
            tokens[r, : len(first.tokens)] = first.tokens
            positions[r, : len(first.targets)] = [position for position, _ in first.targets]
            for c, index in enumerate(group):
                row = example.rows[index]
                choices[r, : len(row.targets), c] = [token for _, token in row.targets]
                example_cells[index] = tuple((r, t, c) for t in range(len(row.targets)))
            r += 1
        cells.append(tuple(example_cells))
    return ScoreBatch((tokens, positions, choices), tuple(texts), tuple(cells))


def answer_sizes(task: Task, tokenizer: Tokenizer) -> tuple[int, int]:
    """Returns (T, C), the maximum number of answer tokens and the number of candidates, of a task with fixed answers.

    Raises InvalidTask if the answers depend on the record.
    """
    texts = task.fixed_answers
    if texts is None:
        raise InvalidTask(
            f"task {task.name!r} takes its answers from the record: set recipe.answer_length and recipe.choices"
        )
    check_tokenizer(tokenizer)
    lengths = [len(encode_choice(tokenizer, Choice("x", text)).answer) for text in texts]
    return max(lengths), len(texts)
