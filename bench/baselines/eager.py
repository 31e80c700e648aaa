"""One MobiZO step (Algorithm 1) in PyTorch eager on a stock transformers model: what the program is timed against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.baselines.adapted import AdaptedModel
from shared.lora import BaseShape
from shared.noise import direction
from shared.recipe import Recipe


class EagerMobizo:
    """B, and a model that runs all 2q perturbed copies of it in one forward pass."""

    def __init__(self, model: Any, recipe: Recipe, shape: BaseShape) -> None:
        """model: transformers' AutoModelForCausalLM."""
        self.adapted, self.recipe = AdaptedModel(model, recipe, shape), recipe
        self.b = self.adapted.zeros()

    @torch.no_grad()
    def step(self, batch: tuple[np.ndarray, ...], seeds: np.ndarray, lr: float, eps: float) -> tuple[Tensor, Tensor]:
        """Inputs as `pack_step` gives them. Returns losses (2q,), coefficients (q,)."""
        recipe = self.recipe
        noise = [direction(recipe.noise, (int(k0), int(k1)), len(self.b)) for k0, k1 in seeds]
        z = torch.from_numpy(np.stack(noise)).to(self.b.device)  # (q, D)
        losses = self.adapted.losses(batch, torch.cat((self.b + eps * z, self.b - eps * z)))
        coefficients = lr / recipe.queries * (losses[: recipe.queries] - losses[recipe.queries :]) / (2 * eps)
        for query in range(recipe.queries):
            self.b -= coefficients[query] * z[query]
        return losses, coefficients
