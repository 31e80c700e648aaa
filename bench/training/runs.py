"""Training runs: contenders, the loop that trains every contender, and the measurements of a run.

Core-seconds are the processor time of all threads of the process (`time.process_time`), which is what drains a battery.
Steps count, with the frozen layers' states that they need; compiling, loading and measuring accuracy do not.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from bench.result import notes
from bench.runner import load_or_compute
from bench.training.learners import Engine, Learner
from device_agent.errors import Diverged
from device_agent.training.batch_sampler import BatchSampler
from shared.canonical import canonical_json, sha256_hex
from shared.recipe import Precision, RecipeSettings
from shared.training_settings import TrainingSettings
from shared.zo.encoding import Example

Split = Literal["validation", "test"]
Calibrated = Literal["gradients", "balanced"]  # balanced: gradients, equally large in all modules


class Contender(BaseModel):
    """One way to train. engine none: not trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(exclude=True)  # not part of a kept run's identity
    engine: Engine
    recipe: RecipeSettings
    training: TrainingSettings  # steps: the maximum
    calibration: Calibrated | None = None  # how A was calibrated on the product reviews; None: A is random

    def with_training(self, **training: Any) -> Self:
        """Returns the contender with some training settings changed, such as the seed or the learning rate."""
        return self.model_copy(update={"training": self.training.model_copy(update=training)})


class Evaluation(BaseModel):
    """Accuracy and loss of a run after some steps. loss: in nats."""

    step: int
    core_seconds: float
    seconds: float
    accuracy: float
    loss: float

    @property
    def rank(self) -> tuple[float, float]:
        """Returns the sort key of evaluations: a better one has a higher accuracy, or else a lower loss."""
        return self.accuracy, -self.loss


class Run(BaseModel):
    """One run. cap: core-seconds after which it ends. loading: core-seconds of loading the program; 0: in the steps.

    evaluations: on its split.
    """

    model_config = ConfigDict(extra="forbid")

    contender: str
    precision: Precision
    seed: int
    lr: float
    eps: float | None
    split: Split
    cap: float | None = None
    loading: float = 0
    steps: int = 0
    core_seconds: float = 0
    seconds: float = 0
    examples: int = 0  # in its steps, with repetitions
    evaluations: list[Evaluation] = []
    diverged: bool = False
    best_step: int = 0  # step with the highest accuracy on its split; among equals, the lowest loss
    best: float | None = None  # test accuracy after `best_step`, if the split is validation
    final: float | None = None  # test accuracy after the last step, if the split is validation; 0 after divergence

    def first_reaching(self, accuracy: float) -> Evaluation | None:
        """Returns the first evaluation at or over an accuracy."""
        return next((evaluation for evaluation in self.evaluations if evaluation.accuracy >= accuracy), None)

    @property
    def accuracy(self) -> float:
        """Returns the accuracy after the last step; 0 if the run diverged."""
        return 0.0 if self.diverged else self.evaluations[-1].accuracy

    @property
    def rank(self) -> tuple[bool, tuple[float, float], float]:
        """Returns the key for choosing a learning rate: accuracy, or the lowest loss if none beats the base alone."""
        evaluations = self.evaluations or [Evaluation(step=0, core_seconds=0, seconds=0, accuracy=0, loss=math.inf)]
        return (
            not self.diverged,
            max(evaluation.rank for evaluation in evaluations),
            -min(evaluation.loss for evaluation in evaluations),
        )


def new_run(contender: Contender, split: Split, **fields: Any) -> Run:
    """Returns a run before its first step."""
    settings = contender.training
    columns = {"seed": settings.seed, "lr": settings.lr, "eps": settings.eps, "precision": contender.recipe.precision}
    return Run(contender=contender.name, split=split, **columns, **fields)


def load_or_run(directory: Path, facts: Mapping[str, Any], contender: Contender, compute: Callable[[], Run]) -> Run:
    """Returns the run with these facts and contender from `directory`; computes and stores it if it is not there."""
    identity = {**facts, "contender": contender.model_dump(mode="json")}
    path = directory / f"{sha256_hex(canonical_json(identity))[:24]}.json"
    run = Run.model_validate(load_or_compute(path, lambda: compute().model_dump(mode="json")))
    return run.model_copy(update={"contender": contender.name})


def train(
    learner: Learner,
    run: Run,
    settings: TrainingSettings,
    examples: Sequence[Example],
    evaluation_steps: Sequence[int] = (),
) -> Iterator[Evaluation]:
    """Trains until the steps are done or the cap is spent, fills `run`, and yields each evaluation on `examples`.

    evaluation_steps: further steps after which it is evaluated, besides the evaluation interval and the last step.
    Divergence ends the run.
    """
    sampler = BatchSampler.of(learner.train, settings.seed, learner.recipe.effective_batch)
    lookahead = replace(sampler)  # a second sampler, because each one keeps only two epochs
    learner.expect(index for step in range(settings.steps) for index in lookahead.indices(step))
    cpu_start = time.process_time()
    learner.prepare()
    run.loading = time.process_time() - cpu_start
    continues = True
    while continues:
        indices = sampler.indices(run.steps)
        cpu_start, start = time.process_time(), time.monotonic()
        loss = learner.step(indices, run.steps, settings)
        run.core_seconds += time.process_time() - cpu_start
        run.seconds += time.monotonic() - start
        run.steps += 1
        run.examples += len(indices)
        continues = run.steps < settings.steps and (run.cap is None or run.core_seconds < run.cap)
        try:
            if not math.isfinite(loss):
                raise Diverged("the loss is not finite")
            if continues and run.steps % settings.evaluation_interval and run.steps not in evaluation_steps:
                continue
            metrics = learner.measure(examples)
        except Diverged:
            run.diverged = True
            return
        times = {"step": run.steps, "core_seconds": run.core_seconds, "seconds": run.seconds}
        run.evaluations.append(Evaluation(**times, accuracy=metrics.accuracy, loss=metrics.loss))
        notes.print(
            f"{run.contender}, lr {run.lr:g}, seed {run.seed}: {metrics.accuracy:.1%} of "
            f"{len(examples)} {run.split} examples, loss {metrics.loss:.3f}, after {run.steps} steps, "
            f"{run.core_seconds:.0f} core-seconds"
        )
        yield run.evaluations[-1]
