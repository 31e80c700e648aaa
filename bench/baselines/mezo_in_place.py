"""MeZO (Malladi et al., 2023; the paper's Algorithm 3) on all parameters, perturbed in place, noise redrawn each time.

It saves memory, because neither a copy of the parameters nor the noise is kept. It costs four passes over all
parameters per query.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.baselines.adapted import AdaptedModel
from bench.programs import Batch
from shared.recipe import Recipe
from shared.zo.lora import BaseShape


class FullMezo:
    """Algorithm 3 with Gaussian noise on every parameter of the model."""

    def __init__(self, model: Any, recipe: Recipe, shape: BaseShape) -> None:
        """model: transformers' AutoModelForCausalLM."""
        self.adapted = AdaptedModel(model, recipe, shape)
        self.adapted.remove()  # no LoRA
        self.parameters = list(model.parameters())

    @torch.no_grad()
    def step(self, batch: Batch, seeds: np.ndarray, lr: float, eps: float) -> tuple[Tensor, Tensor]:
        """Returns, like a program's `step`, losses (2q,), all + before all -, and coefficients (q,)."""
        plus, minus, nothing = [], [], self.adapted.zeros().unsqueeze(0)
        for seed in seeds:
            self._move(seed, eps)
            plus.append(self.adapted.losses(batch, nothing))
            self._move(seed, -2 * eps)
            minus.append(self.adapted.losses(batch, nothing))
            self._move(seed, eps)
        losses = torch.cat((*plus, *minus)).float()
        coefficients = lr / len(seeds) * (losses[: len(seeds)] - losses[len(seeds) :]) / (2 * eps)
        for seed, coefficient in zip(seeds, coefficients.tolist(), strict=True):
            self._move(seed, -coefficient)
        return losses, coefficients

    def _move(self, seed: np.ndarray, scale: float) -> None:
        """Adds `scale` times its noise to every parameter (PerturbParameters)."""
        noise = torch_noise((int(seed[0]), int(seed[1])))
        for parameter in self.parameters:
            parameter.add_(noise(parameter), alpha=scale)


def torch_noise(seed: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """Returns a function that draws Gaussian noise of each parameter in turn, on the parameter's device."""
    generators: dict[torch.device, torch.Generator] = {}

    def draw(parameter: Tensor) -> Tensor:
        if parameter.device not in generators:
            number = (seed[0] & 0xFFFFFFFF) << 32 | seed[1] & 0xFFFFFFFF
            generators[parameter.device] = torch.Generator(parameter.device).manual_seed(number)
        generator = generators[parameter.device]
        return torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)

    return draw
