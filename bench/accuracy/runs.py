"""Training runs of `bench accuracy` on one task, in PyTorch: validated on the way, tested at their best and their end.

The data are the shipped reviews, or records of another task in the form that agents read. Example order, noise,
schedules and evaluation are those of the product; the forward passes are PyTorch's.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer
from torch import Tensor

from bench.baselines.rounding import load_model
from bench.programs import MOVIES, PRODUCTS, tokenizer_of
from bench.result import notes
from bench.training.learners import TorchLearner, torch_learner
from bench.training.runs import Contender, Evaluation, Run, load_or_run, new_run, train
from device_agent.errors import Diverged
from device_agent.training.data import Splits, hold_out, sample
from server.compiler import inspect_base
from server.compiler.checkpoints.base import locate_base
from shared.canonical import canonical_json, sha256_hex
from shared.errors import InvalidDataset
from shared.recipe import BaseRef, Precision, Recipe, RecipeSettings
from shared.task import Task, read_question
from shared.task_templates import named_task
from shared.training_settings import TrainingSettings
from shared.zo.encoding import Example, check_tokenizer, encode_choice, encode_question, read_jsonl

SHIPPED = {"movies": MOVIES, "products": PRODUCTS}
LocatedRecord = tuple[str, dict[str, Any]]  # "file:line" for errors, and the record


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
    train: Sequence[LocatedRecord]
    validation: Sequence[LocatedRecord]
    test: Sequence[LocatedRecord]

    def answer_sizes(self, tokenizer: Tokenizer) -> tuple[int, int]:
        """Returns (T, C): the most tokens of an answer and the most candidates, over all records."""
        check_tokenizer(tokenizer)
        records = (*self.train, *self.validation, *self.test)
        choices = [read_question(self.task, record, location).choices for location, record in records]
        longest = max(
            len(encode_choice(tokenizer, choice).answer) for question_choices in choices for choice in question_choices
        )
        return longest, max(map(len, choices))

    def encode(self, tokenizer: Tokenizer, recipe: Recipe) -> Splits:
        """Returns every record as an example of the recipe's shapes."""
        train, validation, test = (
            [
                encode_question(tokenizer, read_question(self.task, record, location), recipe, location)
                for location, record in split
            ]
            for split in (self.train, self.validation, self.test)
        )
        return Splits.of(train, validation, test)


def read_data(name: str, directory: Path | None, sizes: Sizes) -> Data:
    """Returns a task's records, at most `sizes` of them, the same ones in every run.

    name: of shipped reviews or, with a directory of train.jsonl, test.jsonl and possibly validation.jsonl, of a shipped
    template. Without validation.jsonl a fifth of the training records is held out.
    Raises InvalidTask for an unknown name, InvalidDataset for unusable files.
    """
    task = named_task("sst2" if name in SHIPPED else name)
    data_directory = directory or SHIPPED.get(name)
    if data_directory is None:
        raise InvalidDataset(f"the data of {name!r} is not shipped: pass its directory with --data")
    records_by_split = {path.stem: list(read_jsonl(path)) for path in sorted(data_directory.glob("*.jsonl"))}
    train, validation, test = (records_by_split.get(split, []) for split in ("train", "validation", "test"))
    if not train or not test:
        raise InvalidDataset(f"{data_directory} has no data of {name!r}: it needs train.jsonl and test.jsonl")
    if not validation:
        train, validation = hold_out(train, data_directory)
    limits = (sizes.train, sizes.validation, sizes.test)
    return Data(
        name, task, *(sample(records, count) for records, count in zip((train, validation, test), limits, strict=True))
    )


BATCH = 16  # q E, in the paper's experiments and here


@dataclass(frozen=True)
class Point:
    """A learning rate and a perturbation scale to try."""

    lr: float
    eps: float = 1e-2


@dataclass(frozen=True)
class Setting:
    """The settings that all contenders of one task share."""

    base: str  # directory, file or id
    device: str
    dtype: str  # of the frozen weights and activations; B is float32
    sequence_length: int
    noise: Literal["rademacher", "gaussian"] = "rademacher"

    def contender(
        self, name: str, engine: Any, steps: int = 1, interval: int = 1, queries: int = 1, **fields: Any
    ) -> Contender:
        """Returns a contender that has these settings and q E = 16. interval: steps between validations."""
        recipe = RecipeSettings(
            sequence_length=self.sequence_length,
            noise=self.noise,
            queries=queries,
            effective_batch=BATCH // queries,
            precision=fields.pop("precision", "fp32"),
        )
        training = TrainingSettings(steps=steps, evaluation_interval=interval)
        return Contender(name=name, engine=engine, recipe=recipe, training=training, **fields)


class Runner:
    """Runs contenders on one task. Models are loaded on demand, one at a time."""

    def __init__(self, setting: Setting, data: Data, keep: Path) -> None:
        """keep: a directory of finished runs; they are not repeated."""
        self.setting, self.data, self._keep = setting, data, keep
        files, tokenizer = locate_base(setting.base), tokenizer_of(setting.base, keep)
        self.shape = inspect_base(setting.base)
        answer, choices = data.answer_sizes(tokenizer)
        base = BaseRef(name=files.root.name[:200], sha256=files.sha256)
        self._recipe_fields: dict[str, Any] = {"base": base, "answer_length": answer, "choices": choices}
        self.splits = data.encode(tokenizer, self.recipe(setting.contender("", "none")))
        records = [[record for _, record in split] for split in (data.train, data.validation, data.test)]
        self._identity = dataclasses.asdict(setting) | {
            "base": files.sha256,
            "task": data.task.model_dump(mode="json"),
            "data": sha256_hex(canonical_json(records)),
        }
        self._loaded_model: tuple[Precision, Any] | None = None

    def recipe(self, contender: Contender) -> Recipe:
        """Returns the contender's recipe."""
        return Recipe(**(contender.recipe.model_dump() | self._recipe_fields))

    def best_point(
        self, contender: Contender, grid: Sequence[Point], seeds: Sequence[int]
    ) -> tuple[Point, list[Run], list[Run]]:
        """Returns the first seed's best point, its run for each seed, and the first seed's runs of the grid."""
        grid_runs = [self.run(contender, point, seeds[0]) for point in grid]
        best = max(range(len(grid_runs)), key=lambda index: grid_runs[index].rank)
        return grid[best], [grid_runs[best], *(self.run(contender, grid[best], seed) for seed in seeds[1:])], grid_runs

    def zero_shot(self, precision: Precision = "fp32") -> Run:
        """Measures the base alone."""
        return self.run(self.setting.contender("zero-shot", "none", precision=precision), Point(1e-12), 0)

    def run(self, contender: Contender, point: Point, seed: int) -> Run:
        """Returns a finished run, from `keep` if it is there."""
        contender = contender.with_training(lr=point.lr, eps=point.eps, seed=seed)
        return load_or_run(self._keep, self._identity, contender, lambda: self._run(contender))

    def _run(self, contender: Contender) -> Run:
        run = new_run(contender, "validation", task=self.data.name)
        validation, test = self.splits.validation, self.splits.test
        assert test is not None
        if contender.engine == "none":
            with self._learner(contender) as learner:
                metrics = learner.measure(validation)
                run.best = run.final = learner.measure(test).accuracy
            run.evaluations = [
                Evaluation(step=0, core_seconds=0, seconds=0, accuracy=metrics.accuracy, loss=metrics.loss)
            ]
            return run
        zero_shot = self.zero_shot(contender.recipe.precision)
        run.evaluations, best, best_b = list(zero_shot.evaluations), zero_shot.evaluations[0].rank, None
        with self._learner(contender) as learner:
            for evaluation in train(learner, run, contender.training, validation):
                if evaluation.rank > best:
                    best, run.best_step, best_b = evaluation.rank, evaluation.step, learner.b.clone()
            run.final = 0.0 if run.diverged else _test_accuracy(learner, learner.b, test)
            is_last_step = run.best_step == contender.training.steps
            run.best = (
                zero_shot.best
                if best_b is None
                else run.final
                if is_last_step
                else _test_accuracy(learner, best_b, test)
            )
        notes.print(f"test {run.best:.1%} after {run.best_step} steps{', diverged' if run.diverged else ''}")
        return run

    def _model(self, precision: Precision) -> Any:
        if self._loaded_model is None or self._loaded_model[0] != precision:
            self._loaded_model = None  # frees the previous model first
            model = load_model(self.setting.base, self.setting.device, self.setting.dtype, precision)
            self._loaded_model = (precision, model)
        return self._loaded_model[1]

    def _learner(self, contender: Contender) -> contextlib.closing[TorchLearner]:
        """Returns a context with the contender before its first step; at its end the model is unchanged again."""
        model, recipe = self._model(contender.recipe.precision), self.recipe(contender)
        variant_settings: dict[str, Any] = {"variant": contender.variant, "vera_rank": contender.vera_rank}
        return contextlib.closing(
            torch_learner(contender.engine, model, recipe, self.shape, self.splits.train, **variant_settings)
        )


def _test_accuracy(learner: TorchLearner, b: Tensor, examples: Sequence[Example]) -> float:
    """Returns the test accuracy; 0 if the scores are not finite."""
    try:
        return learner.measure_at(b, examples).accuracy
    except Diverged:
        return 0.0
