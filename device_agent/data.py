"""The device's own data: a directory of JSONL files, read into the splits that a job trains and measures on.

Nothing here is ever sent; what an error may tell the server is kept apart from what it tells this device.
Knows no runtime and no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from device_agent.datasets import check_directory
from device_agent.errors import UnusableRecord
from shared.encoding import Example, load_examples
from shared.errors import InvalidDataset
from shared.job import TrainingSettings
from shared.noise import permutation
from shared.recipe import Recipe
from shared.task import Task, template_fields

# One fixed seed and epochs that training never reaches: every job splits and samples alike, so runs of different
# job seeds can be compared.
SPLIT_SEED = 0
HELD_OUT_EPOCH = 0xFFFFFFFF
SAMPLE_EPOCH = 0xFFFFFFFE
HELD_OUT_SHARE = 5

T = TypeVar("T")  # examples, or records that are none yet


@dataclass(frozen=True)
class Splits:
    """Examples to train on, to choose the best B by, and to report on. test is None if none is read."""

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example] | None

    @property
    def truncated(self) -> int:
        """Training examples whose prompt was cut to the recipe's sequence length."""
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
    """The splits in a data set's directory: train.jsonl, and validation.jsonl and test.jsonl where they exist.

    Without validation.jsonl a fifth of train.jsonl is held out. with_test: read the test split, too.
    Raises UnusableRecord naming file and line.
    A recipe that clips trains on all of train.jsonl and measures nothing: what one more example would hold out, and
    how well B does, must not decide what is sent.
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
    """(train, validation): a fifth of the examples, at least one. Raises UnusableRecord for fewer than 2."""
    if len(examples) < 2:
        why = "one record cannot both train and validate; add records or a validation.jsonl"
        raise UnusableRecord(f"{directory / 'train.jsonl'}: {why}", f"train.jsonl: {why}")
    order = permutation(SPLIT_SEED, HELD_OUT_EPOCH, len(examples))
    count = max(len(examples) // HELD_OUT_SHARE, 1)
    held = set(order[:count].tolist())
    train = [example for index, example in enumerate(examples) if index not in held]
    return train, [examples[index] for index in sorted(held)]


def sample(examples: Sequence[T], limit: int | None) -> Sequence[T]:
    """At most `limit` of the examples: not the first ones, since files are often sorted by label."""
    if limit is None or len(examples) <= limit:
        return examples
    return [examples[index] for index in permutation(SPLIT_SEED, SAMPLE_EPOCH, len(examples))[:limit]]


def _public(error: InvalidDataset, path: Path, task: Task) -> str:
    """What the server may hear: split and line, and a missing field's name, which is the task's own. No value."""
    line = re.match(r":(\d+):", error.detail.removeprefix(str(path)))
    where = f"{path.name}, line {line[1]}" if line else path.name
    missing = [field for field in sorted(_source_fields(task)) if f"field {field!r} is missing" in error.detail]
    why = f"field {missing[0]!r} is missing" if missing else "the device's own log says why"
    return f"{where} cannot be used with task {task.name!r}: {why}"


def _source_fields(task: Task) -> set[str]:
    named = {field for template in task.templates() for field in template_fields(template)}
    return {task.mapped[field].field if field in task.mapped else field for field in named} | {task.label_field}
