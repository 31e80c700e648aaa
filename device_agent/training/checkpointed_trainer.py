"""Training with exact gradients on a device: the loop of `Trainer`, with checkpoints of B and the optimizer's state.

The trajectory does not reproduce the optimizer's state, so the trainer stores it every `CHECKPOINT_STEPS` steps and
before each evaluation. A killed run resumes from its last checkpoint and recomputes the steps after it, with the same
bytes on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_agent.executors import F32, Arrays
from device_agent.executors.program import Rates, scalar
from device_agent.training.dp_sampling import DPSamples
from device_agent.training.result import best_validation, recorded
from device_agent.training.trainer import Split, Trainer
from shared.privacy import ExamplePrivacy
from shared.program import ProgramManifest
from shared.zo.encoding import Example
from shared.zo.proximal import proximal_step

CHECKPOINT_STEPS = 10  # the maximum number of steps that a resumed run recomputes


class CheckpointedTrainer(Trainer):
    """One run whose program has a `state`, resumed from its checkpoints and its trajectory."""

    def _restore_b(self, steps: int) -> None:
        """Restores the program's state after `steps` steps, from a checkpoint and by recomputing the steps after it."""
        self._progress.report("loading")
        at, checkpoints = 0, self._run.checkpoints
        # Checkpoints after steps that the trajectory lacks may be another run's, whose trajectory was moved away.
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
        self._compute(step, self._plan.lr_at(step))

    def _proximal_step(self, step: int) -> None:
        """Moves B towards the start, as `Trainer` does; the optimizer's state does not change."""
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

    def _evaluate(self, split: Split, examples: Sequence[Example] | None, *, best: int | None = None) -> None:
        """Evaluates as `Trainer` does, after a checkpoint, so that the evaluated B can be restored later. The initial B
        needs none.
        """
        known = self._steps == 0 or recorded(self._trajectory, split, self._steps) is not None
        if best is None and examples is not None and not known:
            self._checkpoint()
        super()._evaluate(split, examples, best=best)


class DirectionalTrainer(CheckpointedTrainer):
    """One run with estimator `directional` and an optimizer.

    B always comes from the trajectory; only the optimizer's state comes from checkpoints and recomputed steps. B thus
    equals the trajectory's replay bit for bit, even after a step that another engine rounded differently.
    """

    def _restore(self, step: int, state: F32) -> None:
        Trainer._restore_b(self, step)
        self._restore_beside(self._program.adapter(), state)

    def _recompute(self, step: int) -> None:
        b = self._program.adapter()
        super()._recompute(step)
        self._restore_beside(b, self._program.state())
        self._program.replay(self._seeds(step), self._trajectory.coefficients[step], self._eps)

    def _restore_beside(self, b: F32, state: F32) -> None:
        """Sets B to `b` (D,), and the optimizer's part of the state to that of `state` (M,)."""
        self._program.restore(np.concatenate((b, state[self._plan.manifest.size :])))


class GradientTrainer(CheckpointedTrainer):
    """One run with estimator `gradient`. The trajectory does not record a step's update."""

    def _call_program(self, step: int, lr: float, batch: Arrays, hidden: F32 | None, secret: Arrays) -> tuple[F32, F32]:
        """Returns the step's loss (1,) twice: the trajectory records it in place of a coefficient.

        Of a private step: its totals, int32 (D,), and the norm of the noised mean gradient (1,).
        """
        rates = Rates(lr, self._settings.max_norm, self._settings.weight_decay)
        loss, norm = self._program.gradient_step(batch, rates, secret, hidden)
        if secret:
            return loss, norm
        return (loss, loss) if np.isfinite(norm).all() else (norm, norm)  # a norm that is not finite stops the run

    def _update_privately(self, step: int, lr: float, samples: DPSamples, privacy: ExamplePrivacy) -> tuple[F32, F32]:
        """Returns the norm of the step's noised mean gradient (1,) twice, in place of a loss; B has moved."""

        clip, sigma, keys = scalar(privacy.clip), scalar(privacy.sigma), samples.keys[step]
        *pieces, final = samples.pieces(step, self._recipe.effective_batch)
        totals: NDArray[Any] = np.zeros(self._plan.manifest.size, np.int32)
        for piece in pieces:
            self._check_stop()
            totals, _ = self._update(step, lr, piece, (clip, sigma, scalar(0), keys, totals))
        _, norm = self._update(step, lr, final, (clip, sigma, scalar(1), keys, totals))
        return norm, norm


def trainer_of(manifest: ProgramManifest) -> type[Trainer]:
    """Returns the trainer of a program's runs."""
    if "state" not in manifest.methods:
        return Trainer
    return GradientTrainer if manifest.recipe.estimator == "gradient" else DirectionalTrainer
