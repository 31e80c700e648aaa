"""The material of `bench variance`: a stock model, and batches of two data sets, each a proxy for the other."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer

from bench.baselines.rounding import load_model
from bench.programs import tokenizer_of
from server.compiler.checkpoints.checkpoint import inspect_base
from shared.recipe import BaseRef, Loss, Recipe
from shared.task import Task
from shared.zo.encoding import Arrays, Example, answer_sizes, load_examples, pack_step
from shared.zo.lora import BaseShape
from shared.zo.noise import permutation

BATCH = 16  # examples of a packed batch


@dataclass(frozen=True)
class DataSet:
    """A directory of train.jsonl and test.jsonl, and the task that reads it."""

    name: str
    directory: Path
    task: Task


@dataclass(frozen=True)
class Bench:
    """A model in PyTorch with its frozen weights, its tokenizer and its recipe."""

    model: Any
    shape: BaseShape
    tokenizer: Tokenizer
    recipe: Recipe

    def with_loss(self, loss: Loss) -> Self:
        """Returns the same for another loss."""
        return replace(self, recipe=self.recipe.model_copy(update={"loss": loss}))

    def examples(self, data: DataSet, split: str, count: int) -> list[Example]:
        """Returns at most `count` examples of a split, in whole batches, the same ones every time."""
        found = load_examples(data.directory / f"{split}.jsonl", data.task, self.tokenizer, self.recipe)
        whole = min(count, len(found)) // (2 * BATCH) * 2 * BATCH
        if not whole:
            raise SystemExit(f"{data.directory}: {split} holds fewer than {2 * BATCH} examples")
        return [found[at] for at in permutation(0, 0, len(found))[:whole]]

    def batches(self, examples: list[Example]) -> list[Arrays]:
        """Packs examples for the recipe's loss, BATCH at a time, each batch as long as its longest sequence."""
        return [
            pack_step(examples[at : at + BATCH], self.recipe, dynamic=True) for at in range(0, len(examples), BATCH)
        ]


def open_bench(base: str, sets: tuple[DataSet, DataSet], sequence_length: int) -> Bench:
    """Opens a base model, float32, with the default recipe (rank 16, q_proj and v_proj).

    base: a model's directory, .gguf file or Hugging Face id.
    """
    facts = inspect_base(base)
    with tempfile.TemporaryDirectory() as name:
        tokenizer = tokenizer_of(base, Path(name))
    sizes = np.array([answer_sizes(data.task, tokenizer) for data in sets]).max(0)
    recipe = Recipe(
        base=BaseRef(name=Path(base).stem, sha256=facts.sha256),
        effective_batch=BATCH,
        sequence_length=sequence_length,
        answer_length=int(sizes[0]),
        choices=int(sizes[1]),
        loss="candidates" if all(data.task.shares_prompt for data in sets) else "full",
    )
    return Bench(load_model(base, "cpu", "float32"), facts, tokenizer, recipe)
