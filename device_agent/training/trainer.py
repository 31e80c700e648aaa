"""MobiZO training on a device: the paper's Algorithm 1, with the whole step inside the program.

Every step's coefficients and every evaluation are written to the trajectory before the next step begins; recorded steps
are replayed and never computed again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from device_agent.errors import Diverged
from device_agent.memory import peak_rss_bytes, rss_bytes
from device_agent.runtimes import F32, Arrays, PrivateGradientInput, PrivateStepInput, Runtime
from device_agent.training.checkpoints import Checkpoints
from device_agent.training.data import BatchSampler, Splits
from device_agent.training.dp_sampling import DPSamples
from device_agent.training.evaluation import FrozenStates, measure
from device_agent.training.journal import ResourceUsage, RunPlan
from device_agent.training.prefix import PrefixCache, Upcoming, prefix_cache
from device_agent.training.result import (
    best_validation,
    build_result,
    out_of_patience,
    recorded,
    uploaded_validation,
)
from shared.job import Progress, Result
from shared.privacy import ExamplePrivacy
from shared.zo.encoding import Example, Tokens, pack_step
from shared.zo.noise import query_seeds
from shared.zo.proximal import pull
from shared.zo.trajectory import Evaluation, Ledger, Limits

RATE_STEPS = 20  # over which examples per second are averaged
REPORT_SECONDS = 1.0  # between two reports while a split is measured
SLICE_SECONDS = 0.1  # of a pause, between two checks whether to stop

Secret = PrivateStepInput | PrivateGradientInput


class Stopped(Exception):
    """The run was asked to stop; it resumes from its journal."""


class Trainer:
    """Trains one run from the state of its journal to a result."""

    def __init__(
        self,
        run: RunStorage,
        plan: RunPlan,
        splits: Splits,
        runtime: Runtime,
        report: Callable[[Progress], None],
        stop: Callable[[], bool],
        frozen: PrefixCache | None = None,
    ) -> None:
        """report: called with the progress after steps and evaluations. stop: asked before each call of the program.

        frozen: a cache that this run shares with others of the program and of its rule for lengths; None: its own.
        """
        self._run, self._plan, self._splits, self._runtime = run, plan, splits, runtime
        self._report, self._stop = report, stop
        self._settings, self._recipe = plan.training, plan.manifest.recipe
        self._dynamic = plan.dynamic_length
        self._eps = plan.training.eps_for(plan.manifest.recipe)
        self._prefix = frozen or prefix_cache(runtime, plan.manifest, dynamic=self._dynamic)
        self._upcoming: Upcoming | None = None
        answers = tuple(example.correct for example in splits.train)
        self._order = BatchSampler(plan.training.seed, answers, self._recipe.effective_batch)
        self._dp_samples: DPSamples | None = None if plan.privacy is None else run.dp_samples(plan, len(splits.train))
        self._start, self._half = run.begin_b(plan), plan.half
        self._ledger: Ledger = run.open_trajectory(plan)
        self._earlier_usage = run.figures()
        self._began = time.monotonic()
        self._train_seconds = self._program_seconds = 0.0
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
                    if out_of_patience(self._ledger.trajectory, self._settings.patience):
                        break
                self._step()
            self._evaluate("validation", self._splits.validation)
            result = self._build_result()
            self._run.finish(result)
            return result
        finally:
            self._record_usage()
            self._ledger.close()

    @property
    def _steps(self) -> int:
        return self._ledger.trajectory.steps

    def _load(self, steps: int) -> None:
        """Makes the program's B what it was after `steps` steps, by the program's own arithmetic."""
        self._report_progress("loading")
        self._runtime.load(self._start)
        for step, coefficients in enumerate(self._ledger.trajectory.coefficients[:steps]):
            self._pulse()
            self._runtime.replay(self._seeds(step), coefficients, self._eps)
            self._pull(step)

    def _pull(self, step: int) -> None:
        """Takes B back towards the start by the factor that the ledger has for a step, in a run with pulls."""
        if self._half.pulls:
            factor = self._ledger.trajectory.pulls[step]
            self._runtime.load(pull(self._runtime.adapter(), self._start, factor))

    def _seeds(self, step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return query_seeds(self._settings.seed, step, self._recipe.queries)

    def _step(self) -> None:
        step = self._steps
        self._pulse()
        self._obey_limits()
        began = time.monotonic()
        lr = self._plan.lr_at(step)
        losses, coefficients = self._move(step, lr)
        if not (np.isfinite(losses).all() and np.isfinite(coefficients).all()):
            raise Diverged(f"training diverged at step {step}: the loss is no number any more; lower lr")
        factor = self._half.pull_factor([self._settings.lr_at(step)]) if self._half.pulls else None
        self._ledger.append_step(coefficients, factor)
        self._pull(step)
        self._loss = float(losses.mean()) if self._dp_samples is None else None
        self._step_seconds.append(time.monotonic() - began)
        self._report_progress("training", lr)
        self._train_seconds += time.monotonic() - began
        self._pause(self._step_seconds[-1] * self._limits.rest)

    @property
    def _limits(self) -> Limits:
        """The limits in force."""
        recorded = self._ledger.trajectory.limits
        return recorded[-1] if recorded else Limits()

    def _limits_at(self, step: int) -> Limits:
        """Returns the limits for a step, which here is always the next one."""
        return self._limits

    def _obey_limits(self) -> None:
        """Records the limits of the next step in the ledger if they have changed."""
        limits = self._run.limits()
        # A shorter example costs less only where the program takes any length and nothing of it is kept from before.
        if not self._dynamic or self._prefix is not None:
            limits = limits.model_copy(update={"max_length": None})
        if not limits.same(self._limits):
            self._ledger.append_limits(limits.model_copy(update={"step": self._steps}))

    def _pause(self, seconds: float) -> None:
        """Pauses, unless the run is asked to stop."""
        deadline = time.monotonic() + seconds
        while (remaining_seconds := deadline - time.monotonic()) > 0 and not self._stop():
            time.sleep(min(remaining_seconds, SLICE_SECONDS))

    def _move(self, step: int, lr: float) -> tuple[F32, F32]:
        """Losses (2q,), or noised totals (q,) of a private step, and coefficients (q,) of one step; B has moved."""
        if self._dp_samples is None or self._plan.privacy is None:
            return self._call(step, lr, self._order.indices(step))
        return self._move_privately(step, lr, self._dp_samples, self._plan.privacy)

    def _move_privately(self, step: int, lr: float, samples: DPSamples, privacy: ExamplePrivacy) -> tuple[F32, F32]:
        """Noised totals (q,) and coefficients (q,) of one step on its sample; B has moved.

        A sample over E takes several calls. The last one adds the noise, and it alone moves B.
        """
        *pieces, last = samples.pieces(step, self._recipe.effective_batch)
        summed = np.zeros(self._recipe.queries, np.float32)
        for piece in pieces:
            self._pulse()
            summed, _ = self._call(step, 0.0, piece, PrivateStepInput(privacy.clip, summed))
        return self._call(step, lr, last, PrivateStepInput(privacy.clip, summed + samples.noise[step]))

    def _call(self, step: int, lr: float, indices: list[int], secret: Secret | None = None) -> tuple[F32, F32]:
        """One call of the program on these examples."""
        examples = [self._splits.train[index] for index in indices]
        if (longest := self._limits_at(step).max_length) is not None:
            examples = [example.shortened(longest) for example in examples]
        batch = pack_step(examples, self._recipe, dynamic=self._dynamic)
        began = time.monotonic()
        if self._prefix is None:
            output = self._invoke(step, lr, None, batch, secret)
        else:
            tokens, *labels = batch
            if self._upcoming is None:
                self._upcoming = Upcoming(self._texts_from(step))
            texts = [example.correct_row.tokens for example in examples]
            hidden = self._prefix.hidden(texts, tokens.shape, self._upcoming)
            output = self._invoke(step, lr, hidden, tuple(labels), secret)
        self._program_seconds += time.monotonic() - began
        return output

    def _texts_from(self, step: int) -> Iterator[Tokens]:
        """Yields the texts that training visits from a step on."""
        # An order of its own, because each keeps two epochs only.
        samples = replace(self._order).indices if self._dp_samples is None else self._dp_samples.sample
        for later in range(step, self._settings.steps):
            for index in samples(later):
                yield self._splits.train[index].correct_row.tokens

    def _frozen_states(self, split: str) -> FrozenStates | None:
        """Returns the cache for an evaluation. Training's states have precedence in it, then validation's."""
        if self._prefix is None or "score_suffix" not in self._plan.manifest.methods:
            return None
        visited = self._settings.steps * self._recipe.effective_batch * self._recipe.sequence_length
        reserved = min(visited, sum(len(example.correct_row.tokens) for example in self._splits.train))
        if split == "test":
            reserved += sum(len(row.tokens) for example in self._splits.validation for row in example.rows)
        return FrozenStates(self._prefix, self._prefix.state_bytes(reserved))

    def _invoke(
        self, step: int, lr: float, hidden: F32 | None, batch: Arrays, secret: Secret | None
    ) -> tuple[F32, F32]:
        """Calls the program's step. hidden: the output of `prefix`, then `batch` has no tokens."""
        assert not isinstance(secret, PrivateGradientInput)  # noqa: S101  # only GradientTrainer makes it
        seeds = self._seeds(step)
        if hidden is None:
            return self._runtime.step(batch, seeds, lr, self._eps, secret)
        return self._runtime.suffix(hidden, batch, seeds, lr, self._eps, secret)

    def _evaluate(self, split: str, examples: Sequence[Example] | None, *, best: int | None = None) -> None:
        """Measures and records B as it is, unless the ledger has it. best: the step of B, if it is the best one's."""
        at, adapter = (self._steps, "current") if best is None else (best, "best")
        if self._dp_samples is not None:
            return  # a private run measures nothing on its data
        if examples is None or recorded(self._ledger.trajectory, split, at, adapter) is not None:
            return
        self._report_progress("evaluating")
        last_report = time.monotonic()

        def before_batch() -> None:
            nonlocal last_report
            self._pulse()
            if time.monotonic() - last_report > REPORT_SECONDS:  # a long split must not look like a process that hangs
                self._report_progress("evaluating")
                last_report = time.monotonic()

        frozen = self._frozen_states(split)
        measured = measure(self._runtime, examples, self._recipe, before_batch, dynamic=self._dynamic, frozen=frozen)
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
        self._record_usage()
        self._report_progress("evaluating")

    def _build_result(self) -> Result:
        """Writes both adapters, measures the best on the test split, and sums up."""
        best, last_step = uploaded_validation(self._plan, self._ledger.trajectory), self._steps
        best_step = last_step if best is None else best.step
        last = self._runtime.adapter()
        if best_step != last_step:
            self._load(best_step)
        best_adapter = self._runtime.adapter()
        self._check(best_adapter)
        self._run.write_adapter(self._run.last, last, self._plan, last_step)
        self._run.write_adapter(self._run.best, best_adapter, self._plan, best_step)
        self._evaluate("test", self._splits.test, best=best_step)
        return build_result(self._plan, self._ledger.trajectory, self._record_usage(), self._splits.counts)

    def _check(self, flat: F32) -> None:
        if not np.isfinite(flat).all():
            raise Diverged("training diverged: the adapter has values that are no numbers; lower lr")

    def _record_usage(self) -> ResourceUsage:
        """Records the time and memory spent: those of earlier processes plus this one's."""
        figures = ResourceUsage(
            train_seconds=self._train_seconds,
            program_seconds=self._program_seconds,
            seconds=time.monotonic() - self._began,
            peak_rss_bytes=peak_rss_bytes(),
        )
        figures = self._earlier_usage.plus(figures)
        self._run.record_usage(figures)
        return figures

    def _pulse(self) -> None:
        if self._stop():
            raise Stopped

    def _report_progress(self, phase: str, lr: float | None = None) -> None:
        trajectory = self._ledger.trajectory
        validations = [evaluation for evaluation in trajectory.evaluations if evaluation.split == "validation"]
        best = best_validation(trajectory)
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
                    "seconds_left": None
                    if mean is None
                    else mean * (1 + self._limits.rest) * (self._settings.steps - self._steps),
                    "rss_bytes": rss_bytes(),
                    "accuracy": validations[-1].accuracy if validations else None,
                    "best_accuracy": best and best.accuracy,
                    "validation_loss": validations[-1].loss if validations else None,
                }
            )
        )


class RunStorage(Protocol):
    """One run's trajectory, usage and files; `RunDirectory` stores them on disk."""

    @property
    def best(self) -> Path:
        """Names the adapter with the best validation."""

    @property
    def last(self) -> Path:
        """Names the adapter after the last step."""

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints of B and the optimizer's state, if the program has a `state`."""

    def begin_b(self, plan: RunPlan) -> F32:
        """Returns B (D,) before the first step."""

    def dp_samples(self, plan: RunPlan, examples: int) -> DPSamples:
        """Returns the samples and noise of a private run; equal at every call."""

    def open_trajectory(self, plan: RunPlan) -> Ledger:
        """Opens or creates the trajectory."""

    def limits(self) -> Limits:
        """Returns the limits for the next step."""

    def figures(self) -> ResourceUsage:
        """Returns the recorded resource usage; zeros in a new run."""

    def record_usage(self, figures: ResourceUsage) -> None:
        """Records the resource usage so far."""

    def write_adapter(self, path: Path, flat: F32, plan: RunPlan, step: int) -> None:
        """Writes B (D,) after `step` steps as an adapter file named `best` or `last`."""

    def finish(self, result: Result) -> None:
        """Records the result, after both adapters were written."""
