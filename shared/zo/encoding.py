"""Turns records into a program's inputs: tokenization, placement of the answers and packing into the program's shapes.

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

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer

from shared.errors import InvalidDataset, InvalidTask
from shared.program_inputs import MIN_LENGTH, TOKEN_DTYPE
from shared.recipe import Recipe
from shared.task import Choice, Question, Task, Truncate, read_question
from shared.tokenizer import UnknownToken, check_known

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

    prompt: of a record with candidates, the first one's prompt before it was cut.
    """

    rows: tuple[Row, ...]
    correct: int
    truncated: bool
    prompt: Tokens = ()

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
                try:
                    record = JSON.decode(line)
                except ValueError as error:
                    raise InvalidDataset(f"{location}: the line is not JSON ({error})") from error
                if not isinstance(record, dict):
                    raise InvalidDataset(f"{location}: the line is {type(record).__name__}; it must be a JSON object")
                yield location, record
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDataset(f"{path}: cannot be read ({error})") from error


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


def _packed_length(texts: Iterable[Tokens], recipe: Recipe, dynamic: bool) -> int:
    """Returns S of a batch: the longest text's tokens if the program has a dynamic length, otherwise the recipe's S."""
    return max((MIN_LENGTH, *map(len, texts))) if dynamic else recipe.sequence_length


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
        (rows, _packed_length((example.correct_row.tokens for example in examples), recipe, dynamic)), TOKEN_DTYPE
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
                allowed = _continuations(example, position - len(row.prompt) + 1)
                choices[e, t, : len(allowed)] = allowed
                choice_mask[e, t, : len(allowed)] = 1
    if recipe.loss == "candidates":
        return tokens, positions, choices, choice_mask, mask
    return tokens, positions, answers, mask


@dataclass(frozen=True)
class Reading:
    """A text to read, and the tokens whose log-probabilities are needed after it has been read up to a position.

    picks: (position, tokens), in ascending order of the positions.
    """

    tokens: Tokens
    picks: tuple[tuple[int, Tokens], ...]


@dataclass(frozen=True)
class ScoringPlan:
    """How the candidates of one example are scored.

    readings: the texts; a candidate whose tokens begin another one's is read there. terms: for each candidate, the
    (reading, pick, token) whose log-probabilities it sums. restricted: the log-probabilities of a pick are divided by
    their sum, as in decoding that is limited to the candidates.
    """

    readings: tuple[Reading, ...]
    terms: tuple[tuple[tuple[int, int, int], ...], ...]
    restricted: bool

    @classmethod
    def of(cls, rows: Sequence[Row], *, restrict: bool) -> ScoringPlan:
        """restrict: score as loss `candidates` does; the rows then have one prompt."""
        if restrict:
            rows = restricted(rows)
        paths = sorted({(row.prompt, row.answer[:-1]) for row in rows})
        read = [
            path
            for path, after in zip(paths, [*paths[1:], ((), ())], strict=True)
            if after[0] != path[0] or after[1][: len(path[1])] != path[1]
        ]
        reading_of: dict[tuple[Tokens, Tokens], int] = {}
        for index, (prompt, answer) in enumerate(read):
            for length in range(len(answer) + 1):
                reading_of.setdefault((prompt, answer[:length]), index)
        picks: list[dict[int, dict[int, int]]] = [{} for _ in read]  # by position: tokens with their indices
        for row in rows:
            for position, token in row.targets:
                tokens = picks[reading_of[row.prompt, row.answer[: position - len(row.prompt) + 1]]]
                tokens.setdefault(position, {}).setdefault(token, len(tokens[position]))
        order = [{position: at for at, position in enumerate(sorted(each))} for each in picks]
        terms = []
        for row in rows:
            own = []
            for position, token in row.targets:
                index = reading_of[row.prompt, row.answer[: position - len(row.prompt) + 1]]
                own.append((index, order[index][position], picks[index][position][token]))
            terms.append(tuple(own))
        readings = tuple(
            Reading(prompt + answer, tuple((position, tuple(tokens[position])) for position in sorted(tokens)))
            for (prompt, answer), tokens in zip(read, picks, strict=True)
        )
        return cls(readings, tuple(terms), restrict)

    def scores(self, log_probabilities: Sequence[Sequence[ArrayLike]]) -> list[float]:
        """Returns the log-probability (nats) of each candidate. log_probabilities: by reading, pick and token, over the
        whole vocabulary.
        """
        return [
            float(sum(self._term(log_probabilities[reading][pick], token) for reading, pick, token in terms))
            for terms in self.terms
        ]

    def _term(self, log_probabilities: ArrayLike, token: int) -> float:
        values = np.asarray(log_probabilities, np.float64)
        return float(values[token] - (np.logaddexp.reduce(values) if self.restricted else 0.0))


@dataclass(frozen=True)
class ScoreBatch:
    """The inputs of one `score` call.

    inputs: tokens (R, S), positions (R, T), choices (R, T, C). texts: the tokens of the first rows; the other rows are
    blank. plans: of each example, with its readings in consecutive rows.
    """

    inputs: Arrays
    texts: tuple[Tokens, ...]
    plans: tuple[ScoringPlan, ...]

    def read(self, log_probabilities: NDArray[np.float32]) -> list[list[float]]:
        """Returns the log-probability (nats) of each candidate of each example from `score`'s result (R, T, C)."""
        scores, row = [], 0
        for plan in self.plans:
            scores.append(
                plan.scores(
                    [
                        [log_probabilities[row + at, t, : len(tokens)] for t, (_, tokens) in enumerate(reading.picks)]
                        for at, reading in enumerate(plan.readings)
                    ]
                )
            )
            row += len(plan.readings)
        return scores


def scoring_plan(example: Example, recipe: Recipe) -> ScoringPlan:
    """Returns how the candidates of an example are scored with a recipe's loss."""
    return ScoringPlan.of(example.rows, restrict=recipe.loss == "candidates")


def pack_score(examples: Sequence[Example], recipe: Recipe, *, dynamic: bool = False) -> Iterator[ScoreBatch]:
    """Yields batches of at most R rows that score every candidate of every example, in order.

    dynamic: as in `pack_step`; examples of similar length should then be adjacent. Raises InvalidDataset if the
    candidates of one example do not fit into R rows.
    """
    pending: list[ScoringPlan] = []
    used_rows = 0
    for example in examples:
        plan = scoring_plan(example, recipe)
        needed_rows = len(plan.readings)
        if needed_rows > recipe.score_rows:
            raise InvalidDataset(f"{needed_rows} candidates of one record do not fit {recipe.score_rows} score rows")
        if used_rows + needed_rows > recipe.score_rows:
            yield _score_batch(pending, recipe, dynamic)
            pending, used_rows = [], 0
        pending.append(plan)
        used_rows += needed_rows
    if pending:
        yield _score_batch(pending, recipe, dynamic)


def _score_batch(plans: Sequence[ScoringPlan], recipe: Recipe, dynamic: bool) -> ScoreBatch:
    rows, answer = recipe.score_rows, recipe.answer_length
    readings = [reading for plan in plans for reading in plan.readings]
    tokens = np.zeros((rows, _packed_length((each.tokens for each in readings), recipe, dynamic)), TOKEN_DTYPE)
    positions = np.zeros((rows, answer), TOKEN_DTYPE)
    choices = np.zeros((rows, answer, recipe.choices), TOKEN_DTYPE)
    for r, reading in enumerate(readings):
        tokens[r, : len(reading.tokens)] = reading.tokens
        for t, (position, picked) in enumerate(reading.picks):
            positions[r, t] = position
            choices[r, t, : len(picked)] = picked
    return ScoreBatch((tokens, positions, choices), tuple(reading.tokens for reading in readings), tuple(plans))


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
