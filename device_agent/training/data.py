"""Reads the device's data, a directory of JSONL files, into splits for training and measurement, and samples batches.

The data never leaves the device. A record that does not fit the task is left out. Whether a job fails depends on shares
of the records and on their number, so that no single record's content decides it.

A step's batch depends only on job seed and step number, so resumed runs see the same batches. The epochs' orders are
laid end to end and cut into batches of E; the epoch's short last batch is filled from the next epoch, so every step has
E examples. Within an epoch the right answers alternate in proportion to their counts: a batch of one answer only would
move the model's overall preference, which is noise in every direction it steps in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from device_agent.training.datasets import check_directory
from device_agent.training.journal import ExampleCounts
from shared.errors import InvalidDataset, MobizoError
from shared.job import TrainingSettings
from shared.recipe import Recipe
from shared.task import Task, read_question
from shared.zo.encoding import Example, check_task, encode_question, score_rows
from shared.zo.example_order import alternating
from shared.zo.noise import permutation

# One fixed seed and epochs that training never reaches: every job splits and samples alike, so runs of different
# job seeds can be compared.
SPLIT_SEED = 0
HELD_OUT_EPOCH = 0xFFFFFFFF
SAMPLE_EPOCH = 0xFFFFFFFE
HELD_OUT_SHARE = 5
LEAST_SHARE = 0.5  # of a split's records that must fit the task
MOST_REASONS = 20  # that are kept for the owner
REASON_LENGTH = 500  # characters

T = TypeVar("T")  # examples, or records that are none yet


@dataclass(frozen=True)
class Splits:
    """Examples for training, for selecting the best B, and for the final report. test is None if not read."""

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example] | None
    unusable: int = 0  # training records that do not fit the task
    reasons: tuple[str, ...] = ()  # why records of any split do not fit, for the owner only; the first line sums up

    @property
    def counts(self) -> ExampleCounts:
        """Counts of the training split. A cut example is one whose prompt was cut to the recipe's sequence length."""
        truncated = sum(example.truncated for example in self.train)
        return ExampleCounts(records=len(self.train) + self.unusable, truncated=truncated, unusable=self.unusable)


def read_splits(
    directory: Path,
    task: Task,
    tokenizer: Tokenizer,
    recipe: Recipe,
    settings: TrainingSettings,
    *,
    with_test: bool = True,
) -> Splits:
    """Returns the splits of a data set: train.jsonl, and validation.jsonl and test.jsonl if present.

    Without validation.jsonl a fifth of train.jsonl is held out. with_test: also read the test split. Records are held
    out and sampled before those that do not fit the task are left out, so that a record's content decides about that
    record only. Raises InvalidTask for a task that no record could fit, and InvalidDataset for files that cannot be
    read or a split of which less than LEAST_SHARE fits the task.

    A recipe with clipping trains on all of train.jsonl and measures nothing, because neither the split nor the accuracy
    may depend on private examples. It never fails for the number of records that fit.
    """
    check_directory(directory)
    check_task(task, tokenizer, recipe)
    reader = _Reader(task, tokenizer, recipe)
    train = reader.read(directory / "train.jsonl")
    if recipe.privacy == "clipped":
        return reader.splits(train)
    if (directory / "validation.jsonl").is_file():
        validation = reader.read(directory / "validation.jsonl")
    else:
        train, validation = hold_out(train, directory)
    test = None
    if with_test and (directory / "test.jsonl").is_file():
        test = reader.scored(sample(reader.read(directory / "test.jsonl"), settings.test_limit))
    validation = reader.scored(sample(validation, settings.validation_limit))
    for name, examples in (("train", train), ("validation", validation), ("test", test)):
        if examples is not None and len(_usable(examples)) < max(LEAST_SHARE * len(examples), 1):
            raise InvalidDataset(
                f"{directory}: {len(_usable(examples))} of {len(examples)} {name} records fit task {task.name!r}; at "
                f"least {LEAST_SHARE:.0%} must. {' '.join(reader.reasons[:1])}"
            )
    return reader.splits(train, validation, test)


def _usable(examples: Sequence[Example | None]) -> list[Example]:
    return [example for example in examples if example is not None]


@dataclass
class _Reader:
    """Reads files record by record; None stands for a record that does not fit."""

    task: Task
    tokenizer: Tokenizer
    recipe: Recipe
    unusable: int = 0
    reasons: list[str] = field(default_factory=list)

    def read(self, path: Path) -> list[Example | None]:
        """Returns one entry for each line that is not blank. Raises InvalidDataset if the file cannot be read."""
        try:
            return [self._example(line, f"{path}:{number}") for number, line in _lines(path)]
        except OSError as error:
            raise InvalidDataset(f"{path}: cannot be read ({error})") from error

    def scored(self, examples: Sequence[Example | None]) -> list[Example | None]:
        """Leaves out examples whose candidates do not fit the rows of one `score` call."""
        rows = self.recipe.score_rows
        kept: list[Example | None] = []
        for example in examples:
            if example is not None and len(score_rows(example)) > rows:
                self._leave_out(f"a record's candidates do not fit the program's {rows} score rows")
                kept.append(None)
            else:
                kept.append(example)
        return kept

    def splits(
        self,
        train: Sequence[Example | None],
        validation: Sequence[Example | None] = (),
        test: Sequence[Example | None] | None = None,
    ) -> Splits:
        """Returns the splits without the records that do not fit."""
        usable = _usable(train)
        summary = f"{self.unusable} records of the data set do not fit task {self.task.name!r}"
        return Splits(
            train=usable,
            validation=_usable(validation),
            test=None if test is None else _usable(test),
            unusable=len(train) - len(usable),
            reasons=(summary, *self.reasons) if self.unusable else (),
        )

    def _example(self, line: bytes, where: str) -> Example | None:
        try:
            record = json.loads(line.decode("utf-8"))
            if not isinstance(record, dict):
                raise InvalidDataset(f"{where}: the line is {type(record).__name__}; it must be a JSON object")
            return encode_question(self.tokenizer, read_question(self.task, record, where), self.recipe, where)
        except UnicodeDecodeError:
            self._leave_out(f"{where}: the line is not UTF-8")
        except json.JSONDecodeError as error:
            self._leave_out(f"{where}: the line is not JSON ({error.msg})")
        except Exception as error:  # whatever one record provokes must not end the job
            self._leave_out(
                error.detail if isinstance(error, MobizoError) else f"{where}: {type(error).__name__}: {error}"
            )
        return None

    def _leave_out(self, reason: str) -> None:
        self.unusable += 1
        if len(self.reasons) < MOST_REASONS:
            self.reasons.append(reason[:REASON_LENGTH])


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def hold_out(examples: Sequence[T], directory: Path) -> tuple[list[T], list[T]]:
    """Splits off a fifth of the examples, at least one; returns (train, validation). Raises InvalidDataset for
    fewer than 2.
    """
    if len(examples) < 2:
        why = "one record cannot both train and validate; add records or a validation.jsonl"
        raise InvalidDataset(f"{directory / 'train.jsonl'}: {why}")
    order = permutation(SPLIT_SEED, HELD_OUT_EPOCH, len(examples))
    count = max(len(examples) // HELD_OUT_SHARE, 1)
    held = set(order[:count].tolist())
    train = [example for index, example in enumerate(examples) if index not in held]
    return train, [examples[index] for index in sorted(held)]


def sample(examples: Sequence[T], limit: int | None) -> Sequence[T]:
    """Returns a random sample of at most `limit` examples, since files are often sorted by label."""
    if limit is None or len(examples) <= limit:
        return examples
    return [examples[index] for index in permutation(SPLIT_SEED, SAMPLE_EPOCH, len(examples))[:limit]]


@dataclass(frozen=True)
class BatchSampler:
    """The order in which a run visits training examples, `batch` (E) a step. answers: each one's right answer."""

    seed: int
    answers: tuple[int, ...]
    batch: int
    _epochs: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def indices(self, step: int) -> list[int]:
        """The E example indices of one 0-based step."""
        size = len(self.answers)
        places = range(step * self.batch, (step + 1) * self.batch)
        return [self._epoch(place // size)[place % size] for place in places]

    def _epoch(self, epoch: int) -> list[int]:
        """Returns the order of one epoch. The last two are kept: a batch may end in the epoch after its own."""
        if epoch not in self._epochs:
            if len(self._epochs) == 2:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = alternating(self.seed, epoch, self.answers)
        return self._epochs[epoch]
