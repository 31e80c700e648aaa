"""Training runs of `bench accuracy`: one contender, seed and learning rate each, kept once they are finished.

Example order, noise, schedules and the way a split is measured are the product's own; the forward passes are PyTorch's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel
from torch import Tensor

from bench.accuracy_data import Data
from bench.accuracy_model import load_model
from bench.baselines.adapted import AdaptedModel
from bench.baselines.eager import EagerMobizo
from bench.baselines.first_order import FirstOrder
from bench.baselines.in_place import VectorMezo
from bench.baselines.variants import PeftModel, Variant
from bench.step import notes
from device_agent.data import Splits
from device_agent.errors import Diverged
from device_agent.evaluation import Measured, measure
from device_agent.order import ExampleOrder
from server.compiler import inspect_base
from server.compiler.base import locate_base
from server.compiler.tokenizer import write_tokenizer
from shared.canonical import canonical_json, sha256_hex
from shared.encoding import Example, pack_step
from shared.job import TrainingSettings
from shared.noise import query_seeds
from shared.recipe import BaseRef, Precision, Recipe

Method = Literal["none", "first-order", "mezo", "mobizo"]
BATCH = 16  # q E, in the paper's experiments and here


@dataclass(frozen=True)
class Point:
    """A learning rate and a perturbation scale to try."""

    lr: float
    eps: float = 1e-2


@dataclass(frozen=True)
class Contender:
    """One way to train. grid: what is tried on the validation split; none: not trained at all."""

    name: str
    method: Method
    queries: int = 1
    grid: tuple[Point, ...] = ()
    steps: int = 0
    interval: int = 1  # steps between validations
    precision: Precision = "fp32"  # of the frozen weights
    variant: Variant | None = None  # peft's adapter in place of LoRA-FA by hooks
    vera_rank: int = 256

    @property
    def examples(self) -> int:
        """Examples that a run sees, repeated ones counted again."""
        return self.steps * (BATCH // self.queries)

    @property
    def passes(self) -> int:
        """Sequences that go through the network, forward or back: to the inputs of its layers, both cost the same."""
        return self.steps * 2 * BATCH


class Outcome(BaseModel):
    """What one run came to. Accuracies are shares; after divergence no answer counts as right."""

    contender: str
    task: str
    seed: int
    lr: float
    eps: float
    validation: list[tuple[int, float, float]]  # steps, accuracy, loss in nats
    best_step: int  # of the highest validation accuracy, the lowest loss among equals
    best: float  # test accuracy there
    final: float  # test accuracy after the last step
    diverged: bool = False
    seconds: float = 0.0  # of training steps alone

    @property
    def chosen_by(self) -> tuple[float, float]:
        """Validation accuracy at its best, and minus the loss there."""
        return max((accuracy, -loss) for _, accuracy, loss in self.validation)

    @property
    def rank(self) -> tuple[bool, tuple[float, float], float]:
        """What a learning rate is chosen by; the lowest loss where none did better than the base alone."""
        return not self.diverged, self.chosen_by, -min(loss for *_, loss in self.validation)


@dataclass(frozen=True)
class Setting:
    """What all contenders of one task share."""

    base: str  # directory, file or id
    device: str
    dtype: str  # of the frozen weights and activations; B is float32
    loss: Literal["full", "candidates"]
    sequence_length: int
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    noise: Literal["rademacher", "gaussian"] = "rademacher"


class Scorer:
    """The one method of a runtime that measuring needs, on a B of its own."""

    def __init__(self, model: AdaptedModel, b: Tensor) -> None:
        self.score = lambda inputs: model.score(inputs, b)


@dataclass(frozen=True)
class Trainer:
    """A contender under way. b: what it has trained so far (D,); step: of a batch and a 0-based number, its loss."""

    model: AdaptedModel
    b: Callable[[], Tensor]
    step: Callable[[tuple[np.ndarray, ...], int, TrainingSettings], float]


def first_order(learner: FirstOrder) -> Trainer:
    """SGD by autograd."""

    def step(batch: tuple[np.ndarray, ...], number: int, settings: TrainingSettings) -> float:
        return learner.step(batch, settings.lr_at(number))[0]

    return Trainer(learner.adapted, lambda: learner.b.detach(), step)


def zeroth_order(learner: VectorMezo | EagerMobizo) -> Trainer:
    """SGD by differences of losses, in directions that follow from the job seed as the product's do."""
    recipe = learner.adapted.recipe

    def step(batch: tuple[np.ndarray, ...], number: int, settings: TrainingSettings) -> float:
        seeds = query_seeds(settings.seed, number, recipe.queries)
        losses, _ = learner.step(batch, seeds, settings.lr_at(number), settings.eps_for(recipe))
        return float(losses.mean())

    return Trainer(learner.adapted, lambda: learner.b, step)


@dataclass
class Trained:
    """A run's validations (steps, accuracy, loss), and B at the best of them; None where that is the base alone."""

    seen: list[tuple[int, float, float]]
    best: tuple[float, float]  # accuracy, minus the loss
    best_step: int = 0
    best_b: Tensor | None = None
    diverged: bool = False
    seconds: float = 0.0

    def see(self, step: int, found: Measured, b: Tensor) -> None:
        """One more validation."""
        self.seen.append((step, found.accuracy, found.loss))
        if (rank := (found.accuracy, -found.loss)) > self.best:
            self.best, self.best_step, self.best_b = rank, step, b.clone()


class Runner:
    """Runs contenders on one task. Models are loaded when they are needed, and one at a time."""

    def __init__(self, setting: Setting, data: Data, keep: Path) -> None:
        """keep: a directory; a run whose file is there is read and not run again."""
        self.setting, self.data, self._keep = setting, data, keep
        keep.mkdir(parents=True, exist_ok=True)
        files = locate_base(setting.base)
        write_tokenizer(files, keep / "tokenizer.json")
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(keep / "tokenizer.json"))
        self.shape = inspect_base(setting.base)
        self.base_name = files.root.stem if files.form == "gguf" else Path(setting.base).name
        answer, choices = data.answer_sizes(tokenizer)
        self._recipe = Recipe(
            base=BaseRef(name=files.root.name[:200], sha256=files.sha256),
            sequence_length=setting.sequence_length,
            answer_length=answer,
            choices=choices,
            loss=setting.loss,
            noise=setting.noise,
            queries=1,
            effective_batch=BATCH,
        )
        self.splits: Splits = data.encode(tokenizer, self._recipe)
        records = [[record for _, record in of] for of in (data.train, data.validation, data.test)]
        self._facts = dataclasses.asdict(setting) | {
            "base": files.sha256,
            "task": data.task.model_dump(mode="json"),
            "data": sha256_hex(canonical_json(records)),
        }
        self._loaded: tuple[Precision, Any] | None = None

    def trained(self, contender: Contender) -> int:
        """D: how many numbers the contender trains."""
        with self._trainer(contender) as trainer:
            return trainer.model.size

    def recipe(self, contender: Contender) -> Recipe:
        """The contender's recipe; all take as many score rows."""
        return self._recipe.model_copy(
            update={"queries": contender.queries, "effective_batch": BATCH // contender.queries}
        )

    def chosen(self, contender: Contender, seeds: Sequence[int]) -> tuple[Point, list[Outcome], list[Outcome]]:
        """The grid's best on the first seed, a run of it for each seed, and the first seed's runs of the whole grid."""
        grid = [self.run(contender, point, seeds[0]) for point in contender.grid]
        at = max(range(len(grid)), key=lambda index: grid[index].rank)
        point = contender.grid[at]
        return point, [grid[at], *(self.run(contender, point, seed) for seed in seeds[1:])], grid

    def zero_shot(self, precision: Precision = "fp32") -> Outcome:
        """The base alone."""
        return self.run(Contender("zero-shot", "none", precision=precision), Point(0.0), 0)

    def run(self, contender: Contender, point: Point, seed: int) -> Outcome:
        """One finished run: the kept one if there is one."""
        what = dataclasses.asdict(contender) | {"grid": None, "name": None}
        facts = self._facts | {"contender": what, "lr": point.lr, "eps": point.eps, "seed": seed}
        path = self._keep / f"{sha256_hex(canonical_json(facts))[:24]}.json"
        if path.is_file():
            kept = Outcome.model_validate_json(path.read_bytes())
            return kept.model_copy(update={"contender": contender.name})
        outcome = self._run(contender, point, seed)
        part = path.with_suffix(".part")
        part.write_text(outcome.model_dump_json(indent=2))
        part.replace(path)
        notes.print(
            f"{self.data.name}: {contender.name}, lr {point.lr:g}, eps {point.eps:g}, seed {seed}: validation "
            f"{outcome.chosen_by[0]:.1%} after {outcome.best_step} of {contender.steps} steps, test {outcome.best:.1%}"
            f"{', diverged' if outcome.diverged else ''} ({outcome.seconds:.0f} s)"
        )
        return outcome

    def _run(self, contender: Contender, point: Point, seed: int) -> Outcome:
        blank = {"contender": contender.name, "task": self.data.name, "seed": seed, "lr": point.lr, "eps": point.eps}
        if contender.method == "none":
            with self._trainer(contender) as trainer:
                validation, test = (self._measure(trainer, trainer.b(), split) for split in self.held_out)
            seen = [(0, validation.accuracy, validation.loss)]
            return Outcome(**blank, validation=seen, best_step=0, best=test.accuracy, final=test.accuracy)
        zero = self.zero_shot(contender.precision)
        settings = TrainingSettings(
            steps=contender.steps, lr=point.lr, eps=point.eps, seed=seed, schedule=self.setting.schedule
        )
        with self._trainer(contender) as trainer:
            trained = self._train(trainer, contender, settings, zero)
            final = 0.0 if trained.diverged else self._tested(trainer, trainer.b())
            if trained.best_b is None:
                best = zero.best
            elif trained.best_step == contender.steps:
                best = final
            else:
                best = self._tested(trainer, trained.best_b)
        return Outcome(
            **blank,
            validation=trained.seen,
            best_step=trained.best_step,
            best=best,
            final=final,
            diverged=trained.diverged,
            seconds=trained.seconds,
        )

    def _train(self, trainer: Trainer, contender: Contender, settings: TrainingSettings, zero: Outcome) -> Trained:
        """All steps, validated at the interval and at both ends."""
        recipe, examples = self.recipe(contender), self.splits.train
        order = ExampleOrder(settings.seed, tuple(example.correct for example in examples), recipe.effective_batch)
        trained = Trained(list(zero.validation), zero.chosen_by)
        for step in range(contender.steps):
            batch = pack_step([examples[index] for index in order.indices(step)], recipe, dynamic=True)
            began = time.perf_counter()
            loss = trainer.step(batch, step, settings)
            trained.seconds += time.perf_counter() - began
            done = step + 1
            try:
                if not math.isfinite(loss):
                    raise Diverged("the loss is no number any more")
                if done == contender.steps or done % contender.interval == 0:
                    found = self._measure(trainer, trainer.b(), self.held_out[0])
                    trained.see(done, found, trainer.b())
            except Diverged:
                trained.diverged = True
                break
        return trained

    @property
    def held_out(self) -> tuple[Sequence[Example], Sequence[Example]]:
        """What is chosen by, and what is reported on."""
        assert self.splits.test is not None
        return self.splits.validation, self.splits.test

    def _tested(self, trainer: Trainer, b: Tensor) -> float:
        """Test accuracy; nothing is right where the validation split's scores were still numbers and these are not."""
        try:
            return self._measure(trainer, b, self.held_out[1]).accuracy
        except Diverged:
            return 0.0

    def _measure(self, trainer: Trainer, b: Tensor, examples: Sequence[Example]) -> Measured:
        return measure(Scorer(trainer.model, b), examples, trainer.model.recipe, dynamic=True)

    def _model(self, precision: Precision) -> Any:
        if self._loaded is None or self._loaded[0] != precision:
            self._loaded = None  # frees the other before
            model = load_model(self.setting.base, self.setting.device, self.setting.dtype, precision)
            self._loaded = (precision, model)
        return self._loaded[1]

    @contextlib.contextmanager
    def _trainer(self, contender: Contender) -> Iterator[Trainer]:
        """The contender at its start; the model is the stock one again afterwards."""
        model, recipe = self._model(contender.precision), self.recipe(contender)
        if contender.method == "first-order":
            trainer = first_order(FirstOrder(model, recipe, self.shape))
        elif contender.method == "mobizo":
            trainer = zeroth_order(EagerMobizo(model, recipe, self.shape))
        elif contender.variant is None:
            adapted = AdaptedModel(model, recipe, self.shape)
            trainer = zeroth_order(VectorMezo(adapted, adapted.zeros()))
        else:
            peft = PeftModel(model, recipe, self.shape, contender.variant, contender.vera_rank)
            trainer = zeroth_order(VectorMezo(peft, peft.start))
        try:
            yield trainer
        finally:
            trainer.model.remove()
