"""The pool of examples that shards are cut from: the sources' files joined, and read again in every worker.

Knows tasks and tokenizers; knows no shard and no program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from device_agent.data import HELD_OUT_EPOCH, SPLIT_SEED, sample
from shared.encoding import Example, load_examples
from shared.noise import permutation
from shared.recipe import Recipe
from shared.task import Task


@dataclass(frozen=True)
class Pool:
    """Every example by index, and what nobody trains on. sources: the number of each example's source."""

    train: Sequence[Example]
    sources: tuple[int, ...]
    test: Sequence[Example]

    @property
    def labels(self) -> tuple[int, ...]:
        """The right answer of each example."""
        return tuple(example.correct for example in self.train)


def read_pool(directories: Sequence[Path], task: Task, tokenizer: Tokenizer, recipe: Recipe, most_test: int) -> Pool:
    """The sources' train.jsonl, one after the other, and at most `most_test` of their test.jsonl.

    Where no source has a test.jsonl, a part of the pool is nobody's. Raises InvalidDataset naming file and line.
    """
    train: list[Example] = []
    test: list[Example] = []
    sources: list[int] = []
    for number, directory in enumerate(directories):
        found = load_examples(directory / "train.jsonl", task, tokenizer, recipe)
        train += found
        sources += [number] * len(found)
        if (directory / "test.jsonl").is_file():
            own = load_examples(directory / "test.jsonl", task, tokenizer, recipe)
            test += sample(own, -(-most_test // len(directories)))
    if not test:
        order = permutation(SPLIT_SEED, HELD_OUT_EPOCH, len(train)).tolist()
        cut = max(len(train) - most_test, len(train) // 2)
        test = [train[index] for index in order[cut:]]
        train, sources = [train[index] for index in order[:cut]], [sources[index] for index in order[:cut]]
    return Pool(train, tuple(sources), test[:most_test])
