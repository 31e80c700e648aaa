"""One MobiZO step (Algorithm 1) in PyTorch eager on a stock transformers model: what the program is timed against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.baselines.adapted import AdaptedModel
from bench.baselines.passes import Grouping, passes
from shared.lora import BaseShape
from shared.noise import direction
from shared.recipe import Recipe


class EagerMobizo:
    """B, and a model that runs the 2q perturbed copies of it, all in one forward pass or as `grouping` says."""

    def __init__(self, model: Any, recipe: Recipe, shape: BaseShape, grouping: Grouping = "both") -> None:
        """model: transformers' AutoModelForCausalLM."""
        self.adapted, self.recipe = AdaptedModel(model, recipe, shape), recipe
        self.b = self.adapted.zeros()
        self.passes = passes(grouping, recipe.queries)

    @torch.no_grad()
    def step(self, batch: tuple[np.ndarray, ...], seeds: np.ndarray, lr: float, eps: float) -> tuple[Tensor, Tensor]:
        """Inputs as `pack_step` gives them. Returns losses (2q,), coefficients (q,)."""
        recipe = self.recipe
        noise = [direction(recipe.noise, (int(k0), int(k1)), len(self.b)) for k0, k1 in seeds]
        z = torch.from_numpy(np.stack(noise)).to(self.b.device)  # (q, D)
        losses = torch.zeros(recipe.paths, device=self.b.device)
        for group in self.passes:
            paths = [self.b + (eps if path < recipe.queries else -eps) * z[path % recipe.queries] for path in group]
            losses[group] = self.adapted.losses(batch, torch.stack(paths))
        coefficients = lr / recipe.queries * (losses[: recipe.queries] - losses[recipe.queries :]) / (2 * eps)
        for query in range(recipe.queries):
            self.b -= coefficients[query] * z[query]
        return losses, coefficients
