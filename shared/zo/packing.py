"""Packs encoded examples into the inputs of a program: a training step, and scoring with shared readings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shared.errors import InvalidDataset
from shared.program_inputs import MIN_LENGTH, TOKEN_DTYPE
from shared.recipe import PREFERENCE_LOSSES, Recipe
from shared.training_settings import TrainingSettings
from shared.zo.encoding import Arrays, Example, Row, Tokens, restricted


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
    """Returns the data inputs of `step` for as many examples as its E rows hold. Other rows are masked out.

    Losses full, dpo and kto: tokens (E, S), positions (E, T), answers (E, T), mask (E, T).
    Loss candidates: tokens (E, S), positions (E, T), choices (E, T, C), choice_mask (E, T, C), mask (E, T).
    dynamic: the manifest's `dynamic_length`; S is then the length of the batch's longest sequence.

    Raises ValueError for more examples.
    """
    rows, answer = recipe.effective_batch, recipe.answer_length
    if len(examples) > recipe.examples_per_step:
        raise ValueError(f"{len(examples)} examples for {rows} rows")
    texts = step_texts(examples, recipe)
    tokens = np.zeros((rows, _packed_length(texts, recipe, dynamic)), TOKEN_DTYPE)
    positions = np.zeros((rows, answer), TOKEN_DTYPE)
    answers = np.zeros((rows, answer), TOKEN_DTYPE)
    mask = np.zeros((rows, answer), np.float32)
    choices = np.zeros((rows, answer, recipe.choices), TOKEN_DTYPE)
    choice_mask = np.zeros((rows, answer, recipe.choices), np.float32)
    choice_mask[:, :, 0] = 1
    for e, (example, row) in enumerate(_step_rows(examples, recipe)):
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


def _step_rows(examples: Sequence[Example], recipe: Recipe) -> list[tuple[Example, Row]]:
    """Returns the rows of a step, each with its example: the right answer's, or all of a preference."""
    if recipe.loss in PREFERENCE_LOSSES:
        return [(example, row) for example in examples for row in example.rows]
    return [(example, example.correct_row) for example in examples]


def step_texts(examples: Sequence[Example], recipe: Recipe) -> list[Tokens]:
    """Returns the tokens that the rows of a step read."""
    return [row.tokens for _, row in _step_rows(examples, recipe)]


def pack_preferences(examples: Sequence[Example], recipe: Recipe, settings: TrainingSettings) -> Arrays:
    """Returns reference (E,), weights (E,) and beta [1], which a step takes after `pack_step`'s inputs with the losses
    of preferences; none with another loss. Absent examples have weight 0, and so have the second rows of loss kto.
    """
    if recipe.loss not in PREFERENCE_LOSSES:
        return ()
    reference, weights = np.zeros((2, recipe.effective_batch), np.float32)
    for at, example in enumerate(examples):
        reference[2 * at : 2 * at + 2] = example.reference
        if recipe.loss == "dpo":
            weights[2 * at : 2 * at + 2] = 1, -1
        else:
            weights[2 * at] = settings.desirable_weight if example.liked else -settings.undesirable_weight
    return reference, weights, np.array([settings.beta], np.float32)


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
