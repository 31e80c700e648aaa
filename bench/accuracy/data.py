"""The data of `bench accuracy`: the shipped reviews, or records of another task in the form that agents read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.programs import MOVIES, PRODUCTS
from device_agent.training.data import Splits, hold_out, sample
from shared.errors import InvalidDataset
from shared.recipe import Recipe
from shared.task import Task, read_question
from shared.task_templates import named_task
from shared.zo.encoding import check_tokenizer, encode_choice, encode_question, read_jsonl

SHIPPED = {"movies": MOVIES, "products": PRODUCTS}
Located = tuple[str, dict[str, Any]]  # "file:line" for errors, and the record


@dataclass(frozen=True)
class Sizes:
    """The most examples of each split: train, choose the learning rate, report."""

    train: int
    validation: int
    test: int


@dataclass(frozen=True)
class Data:
    """The records of one task, not yet tokenized."""

    name: str
    task: Task
    train: Sequence[Located]
    validation: Sequence[Located]
    test: Sequence[Located]

    def answer_sizes(self, tokenizer: Tokenizer) -> tuple[int, int]:
        """Returns (T, C): the most tokens of an answer and the most candidates, over all records."""
        check_tokenizer(tokenizer)
        records = (*self.train, *self.validation, *self.test)
        choices = [read_question(self.task, record, where).choices for where, record in records]
        longest = max(len(encode_choice(tokenizer, choice).answer) for several in choices for choice in several)
        return longest, max(map(len, choices))

    def encode(self, tokenizer: Tokenizer, recipe: Recipe) -> Splits:
        """Returns every record as an example of the recipe's shapes."""
        train, validation, test = (
            [encode_question(tokenizer, read_question(self.task, record, where), recipe, where) for where, record in of]
            for of in (self.train, self.validation, self.test)
        )
        return Splits.of(train, validation, test)


def read_data(name: str, directory: Path | None, sizes: Sizes) -> Data:
    """Returns a task's records, at most `sizes` of them, the same ones in every run.

    name: of shipped reviews or, with a directory of train.jsonl, test.jsonl and possibly validation.jsonl, of a shipped
    template. Without validation.jsonl a fifth of the training records is held out.
    Raises InvalidTask for an unknown name, InvalidDataset for unusable files.
    """
    task = named_task("sst2" if name in SHIPPED else name)
    place = directory or SHIPPED.get(name)
    if place is None:
        raise InvalidDataset(f"the data of {name!r} is not shipped: pass its directory with --data")
    read = {path.stem: list(read_jsonl(path)) for path in sorted(place.glob("*.jsonl"))}
    train, validation, test = (read.get(split, []) for split in ("train", "validation", "test"))
    if not train or not test:
        raise InvalidDataset(f"{place} has no data of {name!r}: it needs train.jsonl and test.jsonl")
    if not validation:
        train, validation = hold_out(train, place)
    most = (sizes.train, sizes.validation, sizes.test)
    return Data(name, task, *(sample(of, count) for of, count in zip((train, validation, test), most, strict=True)))
