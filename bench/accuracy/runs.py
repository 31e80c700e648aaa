"""Training runs of `bench accuracy` in PyTorch: validated on the way, tested at their best and their end.

Example order, noise, schedules and evaluation are those of the product; the forward passes are PyTorch's.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bench.baselines.pytorch_model import load_model
from bench.programs import tokenizer_of
from bench.result import notes
from bench.training.learners import Engine, TorchLearner, torch_learner
from bench.training.runs import Contender, Evaluation, Run, load_or_run, new_run, train
from device_agent.errors import Diverged
from device_agent.training.data import sample
from server.compiler import inspect_base
from server.compiler.checkpoints.base import locate_base
from shared.canonical import file_sha256
from shared.recipe import BaseRef, Recipe, RecipeSettings
from shared.task import Task
from shared.training_settings import TrainingSettings
from shared.zo.encoding import Example, answer_sizes, load_examples

BATCH = 16  # q E, in the paper's experiments and here
LENGTH = 256  # of a sequence; longer prompts lose their front
EPS = 1e-2


@dataclass(frozen=True)
class Sizes:
    """The most examples of each split: train, choose the learning rate, report."""

    train: int
    validation: int
    test: int


def contender_of(name: str, engine: Engine, *, steps: int = 1, interval: int = 1, queries: int = 1) -> Contender:
    """Returns a contender with q E = 16. interval: steps between validations."""
    recipe = RecipeSettings(sequence_length=LENGTH, queries=queries, effective_batch=BATCH // queries)
    training = TrainingSettings(steps=steps, evaluation_interval=interval)
    return Contender(name=name, engine=engine, recipe=recipe, training=training)


class Runner:
    """Runs contenders of one base on one data set."""

    def __init__(self, base: str, directory: Path, task: Task, sizes: Sizes, keep: Path) -> None:
        """base: as the compiler reads it. directory: of the data set. keep: finished runs, which are not repeated."""
        files, tokenizer = locate_base(base), tokenizer_of(base, keep)
        answer, choices = answer_sizes(task, tokenizer)
        reference = BaseRef(name=files.root.name[:200], sha256=files.sha256)
        self._recipe_fields = {"base": reference, "answer_length": answer, "choices": choices}
        self._source, self._shape, self._keep = base, inspect_base(base), keep
        recipe = self.recipe(contender_of("", "none"))

        def examples(split: str) -> list[Example]:
            read = load_examples(directory / f"{split}.jsonl", task, tokenizer, recipe)
            return list(sample(read, getattr(sizes, split)))

        self.train, self.validation, self.test = (examples(split) for split in ("train", "validation", "test"))
        self._identity = dataclasses.asdict(sizes) | {
            "base": files.sha256,
            "task": task.model_dump(mode="json"),
            "data": [file_sha256(path) for path in sorted(directory.glob("*.jsonl"))],
        }
        self._model: object = None

    def recipe(self, contender: Contender) -> Recipe:
        """Returns the contender's recipe."""
        return Recipe(**(contender.recipe.model_dump() | self._recipe_fields))

    def best_rate(
        self, contender: Contender, rates: Sequence[float], seeds: Sequence[int]
    ) -> tuple[list[Run], list[Run]]:
        """Returns the run of the first seed's best rate for each seed, and the first seed's run of each rate."""
        trials = [self.run(contender, rate, seeds[0]) for rate in rates]
        best = max(range(len(trials)), key=lambda index: trials[index].rank)
        return [trials[best], *(self.run(contender, rates[best], seed) for seed in seeds[1:])], trials

    def zero_shot(self) -> Run:
        """Measures the base alone."""
        return self.run(contender_of("zero-shot", "none"), 1e-12, 0)

    def run(self, contender: Contender, rate: float, seed: int) -> Run:
        """Returns a finished run, from `keep` if it is there."""
        contender = contender.with_training(lr=rate, eps=EPS, seed=seed)
        return load_or_run(self._keep, self._identity, contender, lambda: self._run(contender))

    def _run(self, contender: Contender) -> Run:
        run = new_run(contender, "validation")
        if contender.engine == "none":
            with self._learner(contender) as learner:
                metrics = learner.measure(self.validation)
                run.best = run.final = learner.measure(self.test).accuracy
            run.evaluations = [
                Evaluation(step=0, core_seconds=0, seconds=0, accuracy=metrics.accuracy, loss=metrics.loss)
            ]
            return run
        zero_shot = self.zero_shot()
        run.evaluations, best, best_b = list(zero_shot.evaluations), zero_shot.evaluations[0].rank, None
        with self._learner(contender) as learner:
            for evaluation in train(learner, run, contender.training, self.validation):
                if evaluation.rank > best:
                    best, run.best_step, best_b = evaluation.rank, evaluation.step, learner.b.clone()
            run.final = 0.0 if run.diverged else _test_accuracy(learner, learner.b, self.test)
            run.best = zero_shot.best if best_b is None else _test_accuracy(learner, best_b, self.test)
        notes.print(f"test {run.best:.1%} after {run.best_step} steps{', diverged' if run.diverged else ''}")
        return run

    def _learner(self, contender: Contender) -> contextlib.closing[TorchLearner]:
        """Returns a context with the contender before its first step; at its end the model is unchanged again."""
        if self._model is None:
            self._model = load_model(self._source)
        recipe = self.recipe(contender)
        return contextlib.closing(torch_learner(contender.engine, self._model, recipe, self._shape, self.train))


def _test_accuracy(learner: TorchLearner, b: Tensor, examples: Sequence[Example]) -> float:
    """Returns the test accuracy; 0 if the scores are not finite."""
    try:
        return learner.measure_at(b, examples).accuracy
    except Diverged:
        return 0.0
