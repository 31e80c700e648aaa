"""Training with an optimizer on a device: the loop of `Trainer`, with checkpoints of B and the optimizer's state.

The trajectory does not reproduce the optimizer's state, so the trainer stores it every `CHECKPOINT_STEPS` steps and
before each evaluation. A killed run resumes from its last checkpoint and recomputes the steps after it, with the same
bytes on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from device_agent.executors import F32
from device_agent.training.checkpoints import CHECKPOINT_STEPS
from device_agent.training.result import best_validation, recorded
from device_agent.training.trainer import Trainer
from shared.zo.encoding import Example
from shared.zo.proximal import proximal_step


class CheckpointedTrainer(Trainer):
    """One run whose program has a `state`, resumed from its checkpoints and its journal."""

    def _load(self, steps: int) -> None:
        """Restores the program's state after `steps` steps, from a checkpoint and by recomputing the steps after it."""
        self._progress.report("loading")
        at, checkpoints = 0, self._run.checkpoints
        # Checkpoints after steps that the ledger lacks may be another run's, whose ledger was moved away.
        checkpoints.keep([step for step in checkpoints.steps() if 0 < self._steps >= step])
        state: F32 | None = None
        for step in reversed([step for step in checkpoints.steps() if step <= steps]):
            state = checkpoints.read(step)
            if state is not None:
                at = step
                break
        if state is None:
            self._program.load(self._start)
        else:
            self._restore(at, state)
        for step in range(at, steps):
            self._check_stop()
            self._recompute(step)
            self._proximal_step(step)
            self._progress.report("loading")  # a step takes its time: the process must not look as if it hung

    def _restore(self, step: int, state: F32) -> None:
        """Restores a checkpoint, float32 (M,), that was taken after `step` steps."""
        self._program.restore(state)

    def _recompute(self, step: int) -> None:
        """Recomputes a recorded step."""
        self._move(step, self._plan.lr_at(step))

    def _proximal_step(self, step: int) -> None:
        """Pulls B towards the start, as `Trainer` does; the optimizer's state does not change."""
        if self._algorithm.has_proximal_term:
            state, size = self._program.state(), self._plan.manifest.size
            b = proximal_step(state[:size], self._start, self._trajectory.proximal_factors[step])
            self._program.restore(np.concatenate((b, state[size:])))

    def _step(self) -> None:
        super()._step()
        if self._steps % CHECKPOINT_STEPS == 0:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Stores the current state, and removes all other checkpoints except that of the best validation."""
        if self._steps not in self._run.checkpoints.steps():
            self._run.checkpoints.write(self._steps, self._program.state())
        best = best_validation(self._trajectory)
        self._run.checkpoints.keep([self._steps, *([] if best is None else [best.step])])

    def _evaluate(self, split: str, examples: Sequence[Example] | None, *, best: int | None = None) -> None:
        """Evaluates as `Trainer` does, after a checkpoint, so that the evaluated B can be restored later."""
        if best is None and examples is not None and recorded(self._trajectory, split, self._steps) is None:
            self._checkpoint()
        super()._evaluate(split, examples, best=best)


class DirectionalTrainer(CheckpointedTrainer):
    """One run with estimator `directional` and an optimizer.

    B always comes from the trajectory; only the optimizer's state comes from checkpoints and recomputed steps. B thus
    equals the trajectory's replay bit for bit, even after a step that another engine rounded differently.
    """

    def _restore(self, step: int, state: F32) -> None:
        Trainer._load(self, step)
        self._restore_beside(self._program.adapter(), state)

    def _recompute(self, step: int) -> None:
        b = self._program.adapter()
        super()._recompute(step)
        self._restore_beside(b, self._program.state())
        self._program.replay(self._seeds(step), self._trajectory.coefficients[step], self._eps)

    def _restore_beside(self, b: F32, state: F32) -> None:
        """Sets B to `b` (D,), and the optimizer's part of the state to that of `state` (M,)."""
        self._program.restore(np.concatenate((b, state[self._plan.manifest.size :])))
