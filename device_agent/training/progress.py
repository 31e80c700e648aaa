"""What a run reports while it trains: its progress, and the time and memory that it has used."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from device_agent.errors import Stopped
from device_agent.executors import ExecutorUsage
from device_agent.executors.program import TrainingProgram
from device_agent.training.result import best_validation
from device_agent.training.run_directory import ResourceUsage
from device_agent.training.run_plan import RunPlan
from shared.errors import MobizoError
from shared.job import Progress
from shared.result import Phase
from shared.zo.trajectory import Trajectory

RATE_STEPS = 20  # over which examples per second are averaged
MEMORY_SECONDS = 1.0  # between two questions to the executor about its memory


class RunProgress:
    """Measures one process's part of a run, and reports the run's progress."""

    def __init__(
        self,
        plan: RunPlan,
        trajectory: Trajectory,
        earlier: ResourceUsage,
        program: TrainingProgram,
        report: Callable[[Progress], None],
    ) -> None:
        """earlier: used by earlier processes. program: its executor's memory is reported. report: called with each
        progress.
        """
        self._plan, self._trajectory, self._program, self._send = plan, trajectory, program, report
        self._began = time.monotonic() - earlier.seconds
        self._asked_at = float("-inf")
        self._memory = ExecutorUsage()
        self._earlier_peak_bytes = earlier.peak_rss_bytes
        self._train_seconds, self.program_seconds = earlier.train_seconds, earlier.program_seconds
        self._step_seconds: deque[float] = deque(maxlen=RATE_STEPS)
        self._loss: float | None = None

    def count_step(self, seconds: float, loss: float | None) -> None:
        """Counts a step that took so many seconds. loss: mean over its paths; None if it is secret."""
        self._train_seconds += seconds
        self._step_seconds.append(seconds)
        self._loss = loss

    def used(self) -> ResourceUsage:
        """Returns the time and memory of the run's processes so far."""
        self._ask()
        return ResourceUsage(
            train_seconds=self._train_seconds,
            program_seconds=self.program_seconds,
            seconds=time.monotonic() - self._began,
            load_seconds=self._memory.load_seconds,
            peak_rss_bytes=max(self._earlier_peak_bytes, self._memory.peak_rss_bytes),
        )

    def report(self, phase: Phase, *, lr: float | None = None, rest: float = 0.0) -> None:
        """Reports the run's progress. lr: of the last step. rest: seconds of pause for each second of a step."""
        if time.monotonic() - self._asked_at > MEMORY_SECONDS:
            self._ask()
        validations = [evaluation for evaluation in self._trajectory.evaluations if evaluation.split == "validation"]
        best = best_validation(self._trajectory)
        seconds = sum(self._step_seconds) / len(self._step_seconds) if self._step_seconds else None
        step, steps = self._trajectory.steps, self._plan.training.steps
        self._send(
            Progress(
                phase=phase,
                step=step,
                steps=steps,
                loss=self._loss,
                lr=lr,
                examples_per_second=seconds and self._plan.manifest.recipe.examples_per_step / seconds,
                seconds_left=None if seconds is None else seconds * (1 + rest) * (steps - step),
                rss_bytes=self._memory.rss_bytes,
                accuracy=validations[-1].accuracy if validations else None,
                best_accuracy=best and best.accuracy,
                validation_loss=validations[-1].loss if validations else None,
            )
        )

    def _ask(self) -> None:
        with suppress(MobizoError, Stopped):  # an executor that has ended
            self._memory = self._program.usage()
        self._asked_at = time.monotonic()
