"""Training runs: what a contender is, the loop that trains every contender, and what a run measured.

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

from bench.baselines.peft_adapters import Variant
from bench.result import notes
from bench.runner import kept
from bench.training.learners import Engine, Learner
from device_agent.errors import Diverged
from device_agent.training.data import BatchSampler
from shared.canonical import canonical_json, sha256_hex
from shared.recipe import Precision, RecipeSettings
from shared.training_settings import TrainingSettings
from shared.zo.calibration import Kind
from shared.zo.encoding import Example

Split = Literal["validation", "test"]


class Contender(BaseModel):
    """One way to train. engine none: not trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(exclude=True)  # not part of a kept run's identity
    engine: Engine
    recipe: RecipeSettings
    training: TrainingSettings  # steps: the maximum
    calibration: Kind | None = None  # how A was calibrated on the product reviews; None: A is random
    variant: Variant | None = None  # an adapter from peft instead of LoRA-FA by hooks
    vera_rank: int = 256

    def at(self, **training: Any) -> Self:
        """Returns the contender with some training settings changed, such as the seed or the learning rate."""
        return self.model_copy(update={"training": self.training.model_copy(update=training)})


class Look(BaseModel):
    """A measurement of a run after some steps. loss: in nats."""

    step: int
    core_seconds: float
    seconds: float
    accuracy: float
    loss: float

    @property
    def rank(self) -> tuple[float, float]:
        """Returns the key of the better look: higher accuracy, then lower loss."""
        return self.accuracy, -self.loss


class Run(BaseModel):
    """One run. cap: core-seconds after which it ends. loading: core-seconds of loading the program; 0: in the steps.

    seen: measurements on its split.
    """

    contender: str
    task: str = "movies"
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
    examples: int = 0  # seen by its steps, with repetitions
    seen: list[Look] = []
    diverged: bool = False
    best_step: int = 0  # of the highest accuracy on its split, the lowest loss among equals
    best: float | None = None  # test accuracy there, where the split is validation
    final: float | None = None  # test accuracy after the last step, where the split is validation; 0 after divergence

    def reached(self, accuracy: float) -> Look | None:
        """Returns the first measurement at or over an accuracy."""
        return next((look for look in self.seen if look.accuracy >= accuracy), None)

    @property
    def accuracy(self) -> float:
        """Returns the accuracy after the last step; 0 if the run diverged."""
        return 0.0 if self.diverged else self.seen[-1].accuracy

    @property
    def rank(self) -> tuple[bool, tuple[float, float], float]:
        """Returns the key for choosing a learning rate: accuracy, or the lowest loss if none beats the base alone."""
        looks = self.seen or [Look(step=0, core_seconds=0, seconds=0, accuracy=0, loss=math.inf)]
        return not self.diverged, max(look.rank for look in looks), -min(look.loss for look in looks)


def begin(contender: Contender, split: Split, **fields: Any) -> Run:
    """Returns a run of which nothing was trained."""
    settings = contender.training
    about = {"seed": settings.seed, "lr": settings.lr, "eps": settings.eps, "precision": contender.recipe.precision}
    return Run(contender=contender.name, split=split, **about, **fields)


def kept_run(directory: Path, facts: Mapping[str, Any], contender: Contender, make: Callable[[], Run]) -> Run:
    """Returns the run with these facts and contender from `directory`; makes and keeps it if it is not there."""
    identity = {**facts, "contender": contender.model_dump(mode="json")}
    path = directory / f"{sha256_hex(canonical_json(identity))[:24]}.json"
    found = Run.model_validate(kept(path, lambda: make().model_dump(mode="json")))
    return found.model_copy(update={"contender": contender.name})


def train(
    learner: Learner, run: Run, settings: TrainingSettings, tested: Sequence[Example], looks: Sequence[int] = ()
) -> Iterator[Look]:
    """Trains until the steps are done or the cap is spent, fills `run`, and yields each measurement on `tested`.

    looks: steps after which it is measured, besides the evaluation interval and the last step. Divergence ends the run.
    """
    order = BatchSampler(settings.seed, tuple(each.correct for each in learner.train), learner.recipe.effective_batch)
    later = replace(order)  # an order of its own, because each keeps two epochs only
    learner.expect(index for step in range(settings.steps) for index in later.indices(step))
    cores = time.process_time()
    learner.prepare()
    run.loading = time.process_time() - cores
    more = True
    while more:
        indices = order.indices(run.steps)
        cores, clock = time.process_time(), time.monotonic()
        loss = learner.step(indices, run.steps, settings)
        run.core_seconds += time.process_time() - cores
        run.seconds += time.monotonic() - clock
        run.steps += 1
        run.examples += len(indices)
        more = run.steps < settings.steps and (run.cap is None or run.core_seconds < run.cap)
        try:
            if not math.isfinite(loss):
                raise Diverged("the loss is not finite")
            if more and run.steps % settings.evaluation_interval and run.steps not in looks:
                continue
            found = learner.measure(tested)
        except Diverged:
            run.diverged = True
            return
        so_far = {"step": run.steps, "core_seconds": run.core_seconds, "seconds": run.seconds}
        run.seen.append(Look(**so_far, accuracy=found.accuracy, loss=found.loss))
        notes.print(
            f"{run.task}: {run.contender}, lr {run.lr:g}, seed {run.seed}: {found.accuracy:.1%} of {len(tested)} "
            f"{run.split} examples, loss {found.loss:.3f}, after {run.steps} steps, {run.core_seconds:.0f} core-seconds"
        )
        yield run.seen[-1]
