"""Training with exact gradients on a device: the loop of `Trainer`, with checkpoints instead of replay.

The trajectory does not record a step's update, so the trainer stores B and the optimizer's state every
`CHECKPOINT_STEPS` steps and before each evaluation. A killed run resumes from its last checkpoint and recomputes the
steps after it, with the same bytes on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_agent.runtimes import F32, I32, Arrays, PrivateGradientInput, PrivateStepInput, Rates
from device_agent.training.checkpoints import CHECKPOINT_STEPS
from device_agent.training.dp_sampling import DPSamples
from device_agent.training.result import best_validation, recorded
from device_agent.training.trainer import Secret, Trainer
from shared.privacy import ExamplePrivacy
from shared.zo.encoding import Example
from shared.zo.proximal import pull
from shared.zo.trajectory import Limits


class GradientTrainer(Trainer):
    """One run with estimator `gradient`, resumed from its checkpoints and its journal."""

    def _load(self, steps: int) -> None:
        """Restores the program's state after `steps` steps, from a checkpoint and by recomputing the steps after it."""
        self._tell("loading")
        at, checkpoints = 0, self._run.checkpoints
        # Checkpoints after steps that the ledger lacks may be another run's, whose ledger was moved away.
        checkpoints.keep([step for step in checkpoints.steps() if 0 < self._steps >= step])
        state: F32 | None = None
        for found in reversed([step for step in checkpoints.steps() if step <= steps]):
            state = checkpoints.read(found)
            if state is not None:
                at = found
                break
        if state is None:
            self._runtime.load(self._start)
        else:
            self._runtime.restore(state)
        for step in range(at, steps):
            self._pulse()
            self._move(step, self._plan.lr_at(step))
            self._pull(step)
            self._tell("loading")  # a step takes its time: the process must not look as if it hung

    def _pull(self, step: int) -> None:
        """Pulls B towards the start, as `Trainer` does; the optimizer's state does not change."""
        if self._half.pulls:
            state, size = self._runtime.state(), self._plan.manifest.size
            pulled = pull(state[:size], self._start, self._ledger.trajectory.pulls[step])
            self._runtime.restore(np.concatenate((pulled, state[size:])))

    def _step(self) -> None:
        super()._step()
        if self._steps % CHECKPOINT_STEPS == 0:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Stores the current state, and removes all other checkpoints except that of the best validation."""
        if self._steps not in self._run.checkpoints.steps():
            self._run.checkpoints.write(self._steps, self._runtime.state())
        best = best_validation(self._ledger.trajectory)
        self._run.checkpoints.keep([self._steps, *([] if best is None else [best.step])])

    def _invoke(
        self, step: int, lr: float, hidden: F32 | None, batch: Arrays, secret: Secret | None
    ) -> tuple[F32, F32]:
        """Returns the step's loss (1,) twice: the trajectory records it in place of a coefficient.

        Of a private step: its totals, int32 (D,), and the norm of the noised mean gradient (1,).
        """
        assert not isinstance(secret, PrivateStepInput)  # noqa: S101  # only Trainer makes it
        rates = Rates(lr, self._settings.max_norm, self._settings.weight_decay)
        if hidden is None:
            loss, norm = self._runtime.gradient_step(batch, rates, secret)
        else:
            loss, norm = self._runtime.gradient_suffix(hidden, batch, rates, secret)
        if secret is not None:
            return loss, norm
        return (loss, loss) if np.isfinite(norm).all() else (norm, norm)  # a norm that is not finite stops the run

    def _move_privately(self, step: int, lr: float, samples: DPSamples, privacy: ExamplePrivacy) -> tuple[F32, F32]:
        """Returns the norm of the step's noised mean gradient (1,) twice, in place of a loss; B has moved."""

        def secret(carried: I32, *, last: bool) -> PrivateGradientInput:
            return PrivateGradientInput(privacy.clip, privacy.sigma, last, samples.keys[step], carried)

        *pieces, final = samples.pieces(step, self._recipe.effective_batch)
        totals: NDArray[Any] = np.zeros(self._plan.manifest.size, np.int32)
        for piece in pieces:
            self._pulse()
            totals, _ = self._call(step, lr, piece, secret(totals, last=False))
        _, norm = self._call(step, lr, final, secret(totals, last=True))
        return norm, norm

    def _limits_at(self, step: int) -> Limits:
        """Returns the limits that applied when the step was first computed."""
        return next((noted for noted in reversed(self._ledger.trajectory.limits) if noted.step <= step), Limits())

    def _evaluate(self, split: str, examples: Sequence[Example] | None, *, best: int | None = None) -> None:
        """Evaluates as `Trainer` does, after a checkpoint, so that the evaluated B can be restored later."""
        if best is None and examples is not None and recorded(self._ledger.trajectory, split, self._steps) is None:
            self._checkpoint()
        super()._evaluate(split, examples, best=best)
