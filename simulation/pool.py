"""The pool of examples from which shards are cut: the joined files of all sources. Every worker reads it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from device_agent.training.data import HELD_OUT_EPOCH, SPLIT_SEED, sample
from shared.recipe import Recipe
from shared.task import Task
from shared.zo.encoding import Example, load_examples
from shared.zo.noise import permutation


@dataclass(frozen=True)
class Pool:
    """All training examples by index, and the test examples. sources: the number of each training example's source."""

    train: Sequence[Example]
    sources: tuple[int, ...]
    test: Sequence[Example]

    @property
    def labels(self) -> tuple[int, ...]:
        """The correct answer of each training example."""
        return tuple(example.correct for example in self.train)


def read_pool(directories: Sequence[Path], task: Task, tokenizer: Tokenizer, recipe: Recipe, most_test: int) -> Pool:
    """Reads the sources' train.jsonl in order, and at most `most_test` examples of their test.jsonl.

    If no source has a test.jsonl, a part of the pool is used for testing. Raises InvalidDataset naming file and line.
    """
    train: list[Example] = []
    test: list[Example] = []
    sources: list[int] = []
    for number, directory in enumerate(directories):
        examples = load_examples(directory / "train.jsonl", task, tokenizer, recipe)
        train += examples
        sources += [number] * len(examples)
        if (directory / "test.jsonl").is_file():
            test_examples = load_examples(directory / "test.jsonl", task, tokenizer, recipe)
            test += sample(test_examples, -(-most_test // len(directories)))
    if not test:
        order = permutation(SPLIT_SEED, HELD_OUT_EPOCH, len(train)).tolist()
        boundary = max(len(train) - most_test, len(train) // 2)
        test = [train[index] for index in order[boundary:]]
        train, sources = [train[index] for index in order[:boundary]], [sources[index] for index in order[:boundary]]
    return Pool(train, tuple(sources), test[:most_test])
