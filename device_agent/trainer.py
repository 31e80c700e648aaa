"""MobiZO on a device: the paper's Algorithm 1, with the whole step inside the program.

A run is its trajectory: every step's coefficients and every evaluation are on disk before the next begins, and
whatever is already there is replayed, never computed again. Knows no HTTP, no lease and no process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from device_agent.data import Splits
from device_agent.errors import Diverged
from device_agent.evaluation import measure
from device_agent.journal import Figures, RunDirectory, RunPlan
from device_agent.memory import peak_rss_bytes, rss_bytes
from device_agent.order import ExampleOrder
from device_agent.prefix import PrefixCache
from device_agent.runtimes import F32, Runtime
from shared.encoding import Example, pack_step
from shared.job import Progress, Result
from shared.noise import query_seeds
from shared.trajectory import Evaluation, TrajectoryFile

RATE_STEPS = 20  # over which examples per second are averaged


class Stopped(Exception):
    """The run was asked to stop; its journal says where to go on."""


class Trainer:
    """One run: from wherever its journal stands to a result."""

    def __init__(
        self,
        run: RunDirectory,
        plan: RunPlan,
        splits: Splits,
        runtime: Runtime,
        report: Callable[[Progress], None],
        stop: Callable[[], bool],
    ) -> None:
        """report: called with the progress after steps and evaluations. stop: asked before each call of the program."""
        self._run, self._plan, self._splits, self._runtime = run, plan, splits, runtime
        self._report, self._stop = report, stop
        self._settings, self._recipe = plan.training, plan.manifest.recipe
        self._dynamic = plan.manifest.dynamic_length
        self._eps = plan.training.eps_for(plan.manifest.recipe)
        self._prefix: PrefixCache | None = None
        if "suffix" in plan.manifest.methods:
            width, bound = plan.manifest.shape.hidden, self._recipe.sequence_length
            self._prefix = PrefixCache(runtime, width, bound, dynamic=self._dynamic)
        answers = tuple(example.correct for example in splits.train)
        self._order = ExampleOrder(plan.training.seed, answers, self._recipe.effective_batch)
        self._start = np.zeros(plan.manifest.size, np.float32)
        self._ledger: TrajectoryFile = run.open_trajectory(plan)
        self._before = run.figures()
        self._began = time.monotonic()
        self._train_seconds = 0.0
        self._step_seconds: deque[float] = deque(maxlen=RATE_STEPS)
        self._loss: float | None = None

    def train(self) -> Result:
        """Trains to the end; best.safetensors, last.safetensors and result.json are then in the run's directory.

        Raises Stopped, Diverged, or RuntimeFailed.
        """
        try:
            self._load(self._steps)
            if self._steps == 0:
                self._evaluate("test", self._splits.test)
            # Evaluations that the ledger has are skipped: a kill may have come just before one or just after.
            while self._steps < self._settings.steps:
                if self._steps % self._settings.evaluation_interval == 0:
                    self._evaluate("validation", self._splits.validation)
                self._step()
            self._evaluate("validation", self._splits.validation)
            result = self._conclude()
            self._run.finish(result)
            return result
        finally:
            self._note()
            self._ledger.close()

    @property
    def _steps(self) -> int:
        return self._ledger.trajectory.steps

    def _load(self, steps: int) -> None:
        """Makes the program's B what it was after `steps` steps, by the program's own arithmetic."""
        self._tell("loading")
        self._runtime.load(self._start)
        for step, coefficients in enumerate(self._ledger.trajectory.coefficients[:steps]):
            self._pulse()
            self._runtime.replay(self._seeds(step), coefficients, self._eps)

    def _seeds(self, step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return query_seeds(self._settings.seed, step, self._recipe.queries)

    def _step(self) -> None:
        step = self._steps
        self._pulse()
        began = time.monotonic()
        lr = self._settings.lr_at(step)
        losses, coefficients = self._move(step, lr)
        if not (np.isfinite(losses).all() and np.isfinite(coefficients).all()):
            raise Diverged(f"training diverged at step {step}: the loss is no number any more; lower lr")
        self._ledger.append_step(coefficients)
        self._loss = float(losses.mean())
        self._step_seconds.append(time.monotonic() - began)
        self._train_seconds += self._step_seconds[-1]
        self._tell("training", lr)

    def _move(self, step: int, lr: float) -> tuple[F32, F32]:
        """Losses (2q,) and coefficients (q,) of one step; B has moved."""
        indices = self._order.indices(step)
        examples = [self._splits.train[index] for index in indices]
        batch = pack_step(examples, self._recipe, dynamic=self._dynamic)
        if self._prefix is None:
            return self._runtime.step(batch, self._seeds(step), lr, self._eps)
        tokens, *labels = batch
        hidden = self._prefix.hidden(indices, examples, tokens)
        return self._runtime.suffix(hidden, tuple(labels), self._seeds(step), lr, self._eps)

    def _evaluate(self, split: str, examples: Sequence[Example] | None, *, best: int | None = None) -> None:
        """Measures and records B as it is, unless the ledger has it. best: the step of B, if it is the best one's."""
        at, adapter = (self._steps, "current") if best is None else (best, "best")
        if examples is None or self._recorded(split, at, adapter) is not None:
            return
        self._tell("evaluating")
        measured = measure(self._runtime, examples, self._recipe, self._pulse, dynamic=self._dynamic)
        self._ledger.append_evaluation(
            Evaluation.model_validate(
                {
                    "step": at,
                    "split": split,
                    "correct": measured.correct,
                    "total": measured.total,
                    "loss": measured.loss,
                    "adapter": adapter,
                }
            )
        )
        self._note()
        self._tell("evaluating")

    def _recorded(self, split: str, step: int, adapter: str) -> Evaluation | None:
        key = (split, step, adapter)
        evaluations = self._ledger.trajectory.evaluations
        return next((found for found in evaluations if (found.split, found.step, found.adapter) == key), None)

    def _validations(self) -> list[Evaluation]:
        return [found for found in self._ledger.trajectory.evaluations if found.split == "validation"]

    def _best(self) -> Evaluation:
        """Highest validation accuracy, then lowest loss, then fewest steps; step 0 stands if nothing beats it."""
        return min(self._validations(), key=lambda found: (-found.accuracy, found.loss, found.step))

    def _conclude(self) -> Result:
        """Writes both adapters, measures the best on the test split, and sums up."""
        best, last_step = self._best(), self._steps
        last = self._runtime.adapter()
        if best.step != last_step:
            self._load(best.step)
        chosen = self._runtime.adapter()
        self._check(chosen)
        self._run.write_adapter(self._run.last, last, self._plan, last_step)
        self._run.write_adapter(self._run.best, chosen, self._plan, best.step)
        self._evaluate("test", self._splits.test, best=best.step)
        tested = self._splits.test is not None
        # Without a test split, validation's numbers stand in for it: the tuned one is the best of several, so kind.
        zero = self._recorded("test" if tested else "validation", 0, "current")
        tuned = self._recorded("test", best.step, "best") if tested else best
        spent = self._note()
        return Result(
            steps=last_step,
            best_step=best.step,
            train_seconds=spent.train_seconds,
            seconds=spent.seconds,
            peak_rss_bytes=spent.peak_rss_bytes,
            train_examples=len(self._splits.train),
            truncated_examples=self._splits.truncated,
            evaluations=tuple(self._ledger.trajectory.evaluations),
            zero_shot_accuracy=zero and zero.accuracy,
            tuned_accuracy=tuned and tuned.accuracy,
        )

    def _check(self, flat: F32) -> None:
        if not np.isfinite(flat).all():
            raise Diverged("training diverged: the adapter has values that are no numbers; lower lr")

    def _note(self) -> Figures:
        """Notes time and memory spent, this process's added to those before it."""
        figures = Figures(
            train_seconds=self._before.train_seconds + self._train_seconds,
            seconds=self._before.seconds + time.monotonic() - self._began,
            peak_rss_bytes=max(self._before.peak_rss_bytes, peak_rss_bytes()),
        )
        self._run.note(figures)
        return figures

    def _pulse(self) -> None:
        if self._stop():
            raise Stopped

    def _tell(self, phase: str, lr: float | None = None) -> None:
        validations = self._validations()
        mean = sum(self._step_seconds) / len(self._step_seconds) if self._step_seconds else None
        self._report(
            Progress.model_validate(
                {
                    "phase": phase,
                    "step": self._steps,
                    "steps": self._settings.steps,
                    "loss": self._loss,
                    "lr": lr,
                    "examples_per_second": mean and self._recipe.effective_batch / mean,
                    "seconds_left": None if mean is None else mean * (self._settings.steps - self._steps),
                    "rss_bytes": rss_bytes(),
                    "accuracy": validations[-1].accuracy if validations else None,
                    "best_accuracy": self._best().accuracy if validations else None,
                }
            )
        )
