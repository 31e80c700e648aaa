"""The data of `bench accuracy`: the shipped reviews, or one of the paper's tasks from its own files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from bench.accuracy.glue import FORMATS, Located, read_task
from bench.programs import MOVIES, PRODUCTS
from device_agent.training.data import Splits, hold_out, sample
from shared.errors import InvalidDataset
from shared.recipe import Recipe
from shared.task import Task, read_question
from shared.task_templates import named_task
from shared.zo.encoding import check_tokenizer, encode_choice, encode_question, read_jsonl

SHIPPED = {"movies": MOVIES, "products": PRODUCTS}
TASKS = (*SHIPPED, *FORMATS)


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
    left_out: int = 0

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

    directory: holds the files of one of the paper's tasks. A task without a validation file holds out a fifth of its
    training records.
    Raises InvalidDataset for an unknown name or unusable files.
    """
    if name in SHIPPED:
        place = SHIPPED[name]
        read = {path.stem: list(read_jsonl(path)) for path in sorted(place.glob("*.jsonl"))}
        data = Data(name, named_task("sst2"), read["train"], read.get("validation", ()), read["test"])
    elif name not in FORMATS:
        raise InvalidDataset(f"no task is named {name!r}; the tasks are {', '.join(TASKS)}")
    elif directory is None:
        raise InvalidDataset(f"the data of {name!r} is not shipped: pass its directory with --data")
    else:
        place, files = directory, read_task(name, directory)
        data = Data(name, named_task(files.task), files.train, (), files.test, files.left_out)
    if not data.validation:
        train, validation = hold_out(data.train, place)
        data = replace(data, train=train, validation=validation)
    if not data.test:
        raise InvalidDataset(f"{place}: no records of {name!r} to test on")
    return replace(
        data,
        train=sample(data.train, sizes.train),
        validation=sample(data.validation, sizes.validation),
        test=sample(data.test, sizes.test),
    )
