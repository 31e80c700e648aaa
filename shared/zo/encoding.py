"""Turns records into examples: tokens, and the places of the answers. `shared.zo.packing` makes a program's inputs.

Three different quantities are called a loss. All are in nats, and all start from the negative log-likelihood (NLL) of
an answer token: over the whole vocabulary with recipe loss `full`, over the possible continuations with `candidates`.

    token mean    the training loss of one path: the mean NLL over all answer tokens of the E examples together, so a
                  long answer weighs more. `step` returns it for 2q paths; `Progress.loss` is the mean over the paths.
    example mean  the mean NLL over one example's own answer tokens. Private steps clip differences of it per example.
    summed nats   -log P(answer | prompt), the sum over the answer's tokens. It ranks candidates; `Evaluation.loss` is
                  its mean over the examples of a split. Like the training loss, it is over the whole vocabulary with
                  recipe loss `full`, and over the possible continuations with `candidates` (`ScoringPlan`).

With loss `candidates`, only forks count: positions after which the candidates with the same tokens so far go on with
different ones. Where all go on with the same token, decoding that is limited to the candidates has no choice, so the
token costs nothing.

A step calls the token mean at B + eps z `loss_plus` and at B - eps z `loss_minus`. Their quotient
(loss_plus - loss_minus) / (2 eps) is the `projected_gradient` along z (Algorithm 1).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.errors import BadRequest, InvalidDataset, InvalidTask
from shared.recipe import Recipe
from shared.task import Task, Truncate
from shared.task_records import Choice, Question, read_question
from shared.tokenizer import UnknownToken, check_known, check_length, check_tokens

# Of records: NaN and infinite numbers, which Python and pandas write, are null.
JSON = json.JSONDecoder(parse_constant=lambda _: None)
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
    """An encoded record: one row for each candidate, and the index of the correct one.

    prompt: of a record with candidates, the first one's prompt before it was cut. Of a record of kind preference, rows
    are the preferred and the rejected answer; or one answer, `liked` or not, and another record's answer after the
    same prompt. reference: the log-probabilities of the rows before training, nats.
    """

    rows: tuple[Row, ...]
    correct: int
    truncated: bool
    prompt: Tokens = ()
    liked: bool = True
    reference: tuple[float, ...] = ()

    @property
    def group(self) -> int:
        """The examples among which batches alternate: those with the same right answer, or that were not liked."""
        return self.correct if self.liked else -1

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
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                location = f"{path}:{number}"
                yield location, read_object(line, location)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDataset(f"{path}: cannot be read ({error})") from error


def read_object(line: str, location: str) -> dict[str, Any]:
    """Returns the JSON object on a line. Raises InvalidDataset naming `location`."""
    try:
        record = JSON.decode(line)
    except (ValueError, RecursionError) as error:
        raise InvalidDataset(f"{location}: the line is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise InvalidDataset(f"{location}: the line is {type(record).__name__}; it must be a JSON object")
    return record


def token_ids(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
    """Returns the tokens of a text; other threads run meanwhile. special: with the tokenizer's own tokens such as BOS.

    `Tokenizer.encode` keeps the interpreter's lock: the tokenization of a text of a million characters would stop every
    other thread, also an event loop, for up to seconds. `encode_batch` releases it.
    """
    ids: list[int] = tokenizer.encode_batch([text], add_special_tokens=special)[0].ids
    return ids


def prompt_tokens(
    tokenizer: Tokenizer, prompt: str | Sequence[int], context: int, vocabulary: int, *, special: bool
) -> tuple[int, ...]:
    """Returns the tokens of a prompt that is continued. special: with the tokenizer's own tokens such as BOS.

    Raises TextTooLong if it exceeds the context, BadRequest if it has no tokens, and UnknownToken. A text of far too
    many characters is not tokenized.
    """
    if isinstance(prompt, str):
        check_length(prompt, context, "prompt:")
        prompt = token_ids(tokenizer, prompt, special=special)
    if not prompt:
        raise BadRequest("prompt: has no tokens")
    check_tokens(prompt, context, vocabulary, "prompt:")
    return tuple(prompt)


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


def truncation(tokenizer: Tokenizer, choice: Choice) -> tuple[Truncate, int]:
    """Returns what a prompt that is too long loses, and how many tokens at its end stay."""
    if choice.truncate == "head" or not choice.ending:
        return choice.truncate, 0
    return choice.truncate, len(token_ids(tokenizer, choice.ending, special=False))


def forks(answers: Sequence[Tokens]) -> list[tuple[int, ...]]:
    """Returns for each answer the positions at which answers with the same tokens so far go on with different ones."""
    following: dict[Tokens, set[int]] = defaultdict(set)
    for answer in answers:
        for position, token in enumerate(answer):
            following[answer[:position]].add(token)
    return [tuple(at for at in range(len(answer)) if len(following[answer[:at]]) > 1) for answer in answers]


def restricted(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Returns the candidates of one prompt with their answers up to the last fork, of which only forks count."""
    positions = forks([row.answer for row in rows])
    return tuple(
        replace(row, answer=row.answer[: (own[-1] if own else 0) + 1], counted=own)
        for row, own in zip(rows, positions, strict=True)
    )


def answer_in_another(answers: Sequence[Tokens]) -> tuple[int, int] | None:
    """Returns the indices of an answer and of another one that begins with it, or None."""
    order = sorted(range(len(answers)), key=answers.__getitem__)
    for first, second in pairwise(order):
        if answers[second][: len(answers[first])] == answers[first]:
            return first, second
    return None


def cut(prompt: Tokens, room: int, truncate: Truncate, ending: int) -> Tokens:
    """Returns `room` tokens of a longer prompt, without its head, tail or middle. ending: last tokens that stay."""
    end = {"head": room, "tail": min(ending, room), "middle": min(max(ending, room - room // 2), room)}[truncate]
    return prompt[: room - end] + prompt[len(prompt) - end :]


def fit_row(
    row: Row,
    bos_tokens: tuple[int, ...],
    recipe: Recipe,
    location: str,
    longest: int | None = None,
    truncate: Truncate = "head",
    ending: int = 0,
) -> tuple[Row, bool]:
    """Returns the row with a prompt cut to S tokens in all, and whether it was cut. `bos_tokens` are kept.

    longest: answer tokens for which room is left; None: the row's own. truncate, ending: see `cut`.
    """
    if not row.prompt:
        raise InvalidDataset(f"{location}: the prompt is empty")
    if not row.answer:
        raise InvalidDataset(f"{location}: an answer is empty")
    if len(row.targets) > recipe.answer_length:
        raise InvalidDataset(
            f"{location}: an answer has {len(row.targets)} tokens; the recipe's answer_length is {recipe.answer_length}"
        )
    bos = bos_tokens if row.prompt[: len(bos_tokens)] == bos_tokens else ()
    max_prompt_length = recipe.sequence_length - ((longest or len(row.answer)) - 1)
    if max_prompt_length <= len(bos):
        raise InvalidDataset(f"{location}: the answer leaves no room for a prompt in {recipe.sequence_length} tokens")
    if len(row.prompt) <= max_prompt_length:
        return row, False
    rest = cut(row.prompt[len(bos) :], max_prompt_length - len(bos), truncate, ending)
    return replace(row, prompt=bos + rest), True


def encode_question(tokenizer: Tokenizer, question: Question, recipe: Recipe, location: str) -> Example:
    """Returns an example in the recipe's shapes. Raises InvalidDataset, naming `location`, if it does not fit."""
    if len(question.choices) > recipe.choices:
        raise InvalidDataset(
            f"{location}: {len(question.choices)} candidates; the recipe's choices is {recipe.choices}"
        )
    bos_tokens = tuple(tokenizer.encode("").ids)
    whole = [encode_choice(tokenizer, choice) for choice in question.choices]
    rows, longest = tuple(whole), None
    if recipe.loss == "candidates":
        if fault := same_beginning([choice.answer for choice in question.choices], [row.answer for row in whole]):
            raise InvalidDataset(f"{location}: {fault}")
        rows = restricted(whole)
        longest = max(len(row.answer) for row in rows)  # all are cut alike, because they have one prompt
    fitted = [
        fit_row(row, bos_tokens, recipe, location, longest, *truncation(tokenizer, choice))
        for row, choice in zip(rows, question.choices, strict=True)
    ]
    rows = tuple(row for row, _ in fitted)
    return Example(rows, question.correct, any(truncated for _, truncated in fitted), whole[0].prompt)


def same_beginning(texts: Sequence[str], answers: Sequence[Tokens]) -> str | None:
    """Returns the sentence for an answer that another one begins with, or None. answers: the tokens of the texts."""
    indices = answer_in_another(answers)
    if indices is None:
        return None
    first, second = (texts[index] for index in indices)
    return (
        f"the answer {first!r} is the beginning of {second!r} in the base's tokens, so that the longer one is never "
        "more likely; end the answers' texts with a full stop, or choose other texts"
    )


def check_answers(task: Task, tokenizer: Tokenizer) -> None:
    """Raises InvalidTask if an answer that is the same for every record begins with another one."""
    texts = task.fixed_answers
    if texts is not None:
        answers = [encode_choice(tokenizer, Choice("x", text)).answer for text in texts]
        if fault := same_beginning(texts, answers):
            raise InvalidTask(f"task {task.name!r}: {fault}")


def check_task(task: Task, tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Raises InvalidTask if recipe and task do not fit together, whatever the records are."""
    if fault := task.loss_fault(recipe.loss):
        raise InvalidTask(fault)
    if recipe.loss == "candidates" and task.generates:
        raise InvalidTask(f"task {task.name!r} writes text and has no candidates; use loss 'full'")
    if recipe.loss == "candidates" and not task.shares_prompt:
        raise InvalidTask(f"task {task.name!r} has a separate prompt for each candidate; use loss 'full'")
    if len(task.answers) > recipe.choices:
        raise InvalidTask(
            f"task {task.name!r} has {len(task.answers)} answers, but the recipe's choices is {recipe.choices}"
        )
    if recipe.loss == "candidates":
        check_answers(task, tokenizer)


def load_examples(
    path: Path, task: Task, tokenizer: Tokenizer, recipe: Recipe, vocabulary: int | None = None
) -> list[Example]:
    """Returns every record of a JSONL file as an example. vocabulary: rows of the embedding table, if they are known.

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
    check_examples(examples, vocabulary, str(path))
    return examples


def check_examples(examples: Iterable[Example], vocabulary: int | None, location: str) -> None:
    """Raises InvalidDataset for a token without a row in the embedding table. vocabulary: its rows, if known."""
    if vocabulary is None:
        return
    tokens = (token for example in examples for row in example.rows for token in (*row.prompt, *row.answer))
    try:
        check_known(tokens, vocabulary, f"{location}: the text")
    except UnknownToken as error:
        raise InvalidDataset(error.detail) from error


def answer_sizes(task: Task, tokenizer: Tokenizer) -> tuple[int, int]:
    """Returns (T, C), the maximum number of answer tokens and the number of candidates, of a task with fixed answers.

    Raises InvalidTask if the answers depend on the record.
    """
    texts = task.fixed_answers
    if texts is None:
        raise InvalidTask(
            f"task {task.name!r} takes its answers from the record: set recipe.answer_length and recipe.choices"
        )
    lengths = [len(encode_choice(tokenizer, Choice("x", text)).answer) for text in texts]
    return max(lengths), len(texts)
