"""Training with exact gradients on a device. The trajectory does not record a step's update."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_agent.executors import F32, I32, Arrays
from device_agent.executors.program import PrivateGradientInput, PrivateStepInput, Rates
from device_agent.training.checkpointed_trainer import CheckpointedTrainer, DirectionalTrainer
from device_agent.training.dp_sampling import DPSamples
from device_agent.training.trainer import Secret, Trainer
from shared.privacy import ExamplePrivacy
from shared.program import ProgramManifest


class GradientTrainer(CheckpointedTrainer):
    """One run with estimator `gradient`, resumed from its checkpoints and its journal."""

    def _invoke(
        self, step: int, lr: float, hidden: F32 | None, batch: Arrays, secret: Secret | None
    ) -> tuple[F32, F32]:
        """Returns the step's loss (1,) twice: the trajectory records it in place of a coefficient.

        Of a private step: its totals, int32 (D,), and the norm of the noised mean gradient (1,).
        """
        assert not isinstance(secret, PrivateStepInput)  # noqa: S101  # only Trainer makes it
        rates = Rates(lr, self._settings.max_norm, self._settings.weight_decay)
        if hidden is None:
            loss, norm = self._program.gradient_step(batch, rates, secret)
        else:
            loss, norm = self._program.gradient_suffix(hidden, batch, rates, secret)
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
            self._check_stop()
            totals, _ = self._call(step, lr, piece, secret(totals, last=False))
        _, norm = self._call(step, lr, final, secret(totals, last=True))
        return norm, norm


def trainer_of(manifest: ProgramManifest) -> type[Trainer]:
    """Returns the trainer of a program's runs."""
    if "state" not in manifest.methods:
        return Trainer
    return GradientTrainer if manifest.recipe.estimator == "gradient" else DirectionalTrainer
