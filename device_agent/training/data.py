"""Reads the device's data, a directory of JSONL files, into splits for training and measurement, and samples batches.

The data never leaves the device; an error's public message contains none of it.

A step's batch depends only on job seed and step number, so resumed runs see the same batches. The epochs' orders are
laid end to end and cut into batches of E; the epoch's short last batch is filled from the next epoch, so every step has
E examples. Within an epoch the right answers alternate in proportion to their counts: a batch of one answer only would
move the model's overall preference, which is noise in every direction it steps in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from device_agent.errors import UnusableRecord
from device_agent.training.datasets import check_directory
from shared.errors import InvalidDataset
from shared.job import TrainingSettings
from shared.recipe import Recipe
from shared.task import Task, template_fields
from shared.zo.encoding import Example, load_examples
from shared.zo.example_order import alternating
from shared.zo.noise import permutation

# One fixed seed and epochs that training never reaches: every job splits and samples alike, so runs of different
# job seeds can be compared.
SPLIT_SEED = 0
HELD_OUT_EPOCH = 0xFFFFFFFF
SAMPLE_EPOCH = 0xFFFFFFFE
HELD_OUT_SHARE = 5

T = TypeVar("T")  # examples, or records that are none yet


@dataclass(frozen=True)
class Splits:
    """Examples for training, for selecting the best B, and for the final report. test is None if not read."""

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example] | None

    @property
    def truncated(self) -> int:
        """Number of training examples whose prompt was cut to the recipe's sequence length."""
        return sum(example.truncated for example in self.train)


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

    Without validation.jsonl a fifth of train.jsonl is held out. with_test: also read the test split. Raises
    UnusableRecord that names file and line. A recipe with clipping trains on all of train.jsonl and measures nothing,
    because neither the split nor the accuracy may depend on private examples.
    """
    check_directory(directory)

    def read(name: str) -> list[Example]:
        path = directory / f"{name}.jsonl"
        try:
            return load_examples(path, task, tokenizer, recipe)
        except InvalidDataset as error:
            raise UnusableRecord(error.detail, _public(error, path, task)) from error

    train = read("train")
    if recipe.privacy == "clipped":
        return Splits(train=train, validation=(), test=None)
    if (directory / "validation.jsonl").is_file():
        validation = read("validation")
    else:
        train, validation = hold_out(train, directory)
    test = read("test") if with_test and (directory / "test.jsonl").is_file() else None
    return Splits(
        train=train,
        validation=sample(validation, settings.validation_limit),
        test=None if test is None else sample(test, settings.test_limit),
    )


def hold_out(examples: Sequence[T], directory: Path) -> tuple[list[T], list[T]]:
    """Splits off a fifth of the examples, at least one; returns (train, validation). Raises UnusableRecord for
    fewer than 2.
    """
    if len(examples) < 2:
        why = "one record cannot both train and validate; add records or a validation.jsonl"
        raise UnusableRecord(f"{directory / 'train.jsonl'}: {why}", f"train.jsonl: {why}")
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


def _public(error: InvalidDataset, path: Path, task: Task) -> str:
    """Returns the message for the server: split, line and the name of a missing field, but no value."""
    line = re.match(r":(\d+):", error.detail.removeprefix(str(path)))
    where = f"{path.name}, line {line[1]}" if line else path.name
    missing = [field for field in sorted(_source_fields(task)) if f"field {field!r} is missing" in error.detail]
    why = f"field {missing[0]!r} is missing" if missing else "the device's own log says why"
    return f"{where} cannot be used with task {task.name!r}: {why}"


def _source_fields(task: Task) -> set[str]:
    named = {field for template in task.templates() for field in template_fields(template)}
    return {task.mapped[field].field if field in task.mapped else field for field in named} | {task.label_field}


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
