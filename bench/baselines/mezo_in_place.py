"""MeZO (Malladi et al., 2023; the paper's Algorithm 3): parameters perturbed in place, noise redrawn each time.

It saves memory, because neither a copy of the parameters nor the noise is kept. It costs four passes over all
parameters per query.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.baselines.adapted import AdaptedModel
from bench.timing import Batch
from shared.recipe import Recipe
from shared.zo.lora import BaseShape
from shared.zo.noise import direction

Seed = tuple[int, int]


class InPlaceMezo:
    """Algorithm 3 over any parameters of any loss."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        loss: Callable[[Batch], Tensor],
        draw: Callable[[Seed], Callable[..., Tensor]],
    ) -> None:
        """loss: of a batch under the current parameters, (1,).

        draw: takes a seed and returns a function that returns the noise of each parameter, called in their order.
        """
        self.parameters, self.loss, self.draw = parameters, loss, draw

    @torch.no_grad()
    def step(self, batch: Batch, seeds: np.ndarray, lr: float, eps: float) -> tuple[Tensor, Tensor]:
        """Returns, like a program's `step`, losses (2q,), all + before all -, and coefficients (q,)."""
        plus, minus = [], []
        for seed in seeds:
            self._move(seed, eps)
            plus.append(self.loss(batch))
            self._move(seed, -2 * eps)
            minus.append(self.loss(batch))
            self._move(seed, eps)
        losses = torch.cat((*plus, *minus)).float()
        coefficients = lr / len(seeds) * (losses[: len(seeds)] - losses[len(seeds) :]) / (2 * eps)
        for seed, coefficient in zip(seeds, coefficients.tolist(), strict=True):
            self._move(seed, -coefficient)
        return losses, coefficients

    def _move(self, seed: np.ndarray, scale: float) -> None:
        """Adds `scale` times its noise to every parameter (PerturbParameters)."""
        noise = self.draw((int(seed[0]), int(seed[1])))
        for parameter in self.parameters:
            parameter.add_(noise(parameter), alpha=scale)


class VectorMezo(InPlaceMezo):
    """MeZO on one flat vector, with a program's noise: LoRA-FA's B, or all trainable numbers of another adapter."""

    def __init__(self, adapted: AdaptedModel, start: Tensor) -> None:
        """start: float32 (D,); a copy of it is trained."""
        self.adapted, self.b = adapted, start.clone()
        super().__init__([self.b], lambda batch: adapted.losses(batch, self.b.unsqueeze(0)), self._noise)

    def _noise(self, seed: Seed) -> Callable[[Tensor], Tensor]:
        z = direction(self.adapted.recipe.noise, seed, len(self.b))
        return lambda parameter: torch.from_numpy(z).to(parameter.device)


def mezo_full(model: Any, recipe: Recipe, shape: BaseShape) -> tuple[InPlaceMezo, AdaptedModel]:
    """Returns MeZO with Gaussian noise on every parameter of the model, and the model that it runs."""
    adapted = AdaptedModel(model, recipe, shape)
    adapted.remove()  # no LoRA
    nothing = adapted.zeros().unsqueeze(0)
    return InPlaceMezo(list(model.parameters()), lambda batch: adapted.losses(batch, nothing), torch_noise), adapted


def torch_noise(seed: Seed) -> Callable[[Tensor], Tensor]:
    """Returns a function that draws Gaussian noise of each parameter in turn, on the parameter's device."""
    generators: dict[torch.device, torch.Generator] = {}

    def draw(parameter: Tensor) -> Tensor:
        if parameter.device not in generators:
            number = (seed[0] & 0xFFFFFFFF) << 32 | seed[1] & 0xFFFFFFFF
            generators[parameter.device] = torch.Generator(parameter.device).manual_seed(number)
        generator = generators[parameter.device]
        return torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)

    return draw
