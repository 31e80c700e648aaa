"""MeZO (Malladi et al., 2023; the paper's Algorithm 3) in PyTorch eager, one perturbed vector at a time.

Of any model that gives the loss of a flat float32 vector: LoRA-FA's B, or all that another adapter trains.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bench.baselines.adapted import AdaptedModel
from shared.noise import direction


class EagerMezo:
    """A vector, and a model that is run on one perturbed copy of it after another."""

    def __init__(self, adapted: AdaptedModel, start: Tensor) -> None:
        """start: float32 (D,), what is trained."""
        self.adapted, self.b = adapted, start.clone()

    @torch.no_grad()
    def step(self, batch: tuple[np.ndarray, ...], seeds: np.ndarray, lr: float, eps: float) -> tuple[Tensor, Tensor]:
        """As a program's `step`: losses (2q,), coefficients (q,). The noise is drawn again where it is needed again."""
        losses = torch.cat(
            [
                self.adapted.losses(batch, (self.b + sign * eps * self._noise(seed)).unsqueeze(0))
                for sign in (1, -1)
                for seed in seeds
            ]
        )
        plus, minus = losses.reshape(2, -1)
        coefficients = lr / len(seeds) * (plus - minus) / (2 * eps)
        for coefficient, seed in zip(coefficients, seeds, strict=True):
            self.b -= coefficient * self._noise(seed)
        return losses, coefficients

    def _noise(self, seed: np.ndarray) -> Tensor:
        z = direction(self.adapted.recipe.noise, (int(seed[0]), int(seed[1])), len(self.b))
        return torch.from_numpy(z).to(self.b.device)
