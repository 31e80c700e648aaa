"""What `bench variance` looks at: a stock model, and batches of two data sets, each a proxy for the other."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from bench.programs import DATA
from server.compiler.base import locate_base
from server.compiler.checkpoint import inspect_base
from server.compiler.tokenizer import write_tokenizer
from shared.encoding import Arrays, Example, answer_sizes, load_examples, pack_step
from shared.lora import BaseShape
from shared.noise import permutation
from shared.recipe import BaseRef, Loss, Recipe
from shared.task import Task
from shared.tasks import named_task

BATCH = 16  # examples of a packed batch
PRODUCTS = DATA.parent / "product_reviews"


@dataclass(frozen=True)
class DataSet:
    """A directory of train.jsonl and test.jsonl, and the task that reads it."""

    name: str
    directory: Path
    task: Task


@dataclass(frozen=True)
class Bench:
    """A model in PyTorch with its frozen weights, and how its texts become tokens."""

    model: Any
    shape: BaseShape
    tokenizer: Tokenizer
    recipe: Recipe

    def with_loss(self, loss: Loss) -> Bench:
        """The same, for another loss."""
        return replace(self, recipe=self.recipe.model_copy(update={"loss": loss}))

    def examples(self, data: DataSet, split: str, count: int) -> list[Example]:
        """At most `count` examples of a split, whole batches of them, the same ones every time."""
        found = load_examples(data.directory / f"{split}.jsonl", data.task, self.tokenizer, self.recipe)
        whole = min(count, len(found)) // (2 * BATCH) * 2 * BATCH
        if not whole:
            raise SystemExit(f"{data.directory}: {split} holds fewer than {2 * BATCH} examples")
        return [found[at] for at in permutation(0, 0, len(found))[:whole]]

    def batches(self, examples: list[Example]) -> list[Arrays]:
        """Packed for the recipe's loss, BATCH at a time, each as long as its longest sequence."""
        return [
            pack_step(examples[at : at + BATCH], self.recipe, dynamic=True) for at in range(0, len(examples), BATCH)
        ]


def review_sets(task: str, data: Path | None, proxy_task: str, proxy: Path | None) -> tuple[DataSet, DataSet]:
    """The user's data set and its proxy; by default the movie and the product reviews."""
    own = DataSet("movies" if data is None else data.name, data or DATA, named_task(task))
    return own, DataSet("products" if proxy is None else proxy.name, proxy or PRODUCTS, named_task(proxy_task))


def open_bench(base: str, sets: tuple[DataSet, DataSet], sequence_length: int, device: str) -> Bench:
    """A base model on `device`, float32, and the default recipe (rank 16, q_proj and v_proj) for both data sets.

    base: a model's directory, .gguf file or Hugging Face id.
    """
    from transformers import AutoModelForCausalLM

    files, facts = locate_base(base), inspect_base(base)
    with tempfile.TemporaryDirectory() as name:
        write_tokenizer(files, Path(name) / "tokenizer.json")
        tokenizer = Tokenizer.from_file(str(Path(name) / "tokenizer.json"))
    sizes = np.array([answer_sizes(data.task, tokenizer) for data in sets]).max(0)
    recipe = Recipe(
        base=BaseRef(name=Path(base).stem, sha256=facts.sha256),
        effective_batch=BATCH,
        sequence_length=sequence_length,
        answer_length=int(sizes[0]),
        choices=int(sizes[1]),
        loss="candidates" if all(data.task.shares_prompt for data in sets) else "full",
    )
    root, where = (files.root.parent, {"gguf_file": files.root.name}) if files.form == "gguf" else (files.root, {})
    model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32, **where).to(device)
    return Bench(model, facts, tokenizer, recipe)
