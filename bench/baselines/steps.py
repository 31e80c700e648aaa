"""Steps of the baselines in PyTorch, on a stock transformers model: first order, MeZO and MobiZO."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bench.baselines.adapted import AdaptedModel
from bench.programs import Batch
from server.compiler.methods.optimizers import BETAS, MOMENTUM, STABILITY
from shared.recipe import Recipe
from shared.zo.calibration import Calibration
from shared.zo.lora import BaseShape
from shared.zo.noise import direction


class FirstOrder:
    """First order on B (LoRA-FA): SGD, or the optimizer of a recipe with estimator `gradient`."""

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        shape: BaseShape,
        *,
        checkpointing: bool = False,
        calibration: Calibration | None = None,
    ) -> None:
        """model: transformers' AutoModelForCausalLM. checkpointing: recompute each layer's activations."""
        self.adapted = AdaptedModel(model, recipe, shape, calibration)
        self.b = self.adapted.zeros().requires_grad_()
        self._optimizer: Any
        if recipe.estimator == "gradient" and recipe.optimizer == "adam":
            self._optimizer = torch.optim.Adam([self.b], betas=BETAS, eps=STABILITY)
        else:
            momentum = MOMENTUM if recipe.optimizer == "momentum" else 0.0
            self._optimizer = torch.optim.SGD([self.b], lr=0.0, momentum=momentum)
        if checkpointing:
            # transformers recomputes in training mode only; these models have no dropout that it would switch on.
            model.train()
            model.activation_checkpointing_enable({"use_reentrant": False})

    def step(self, batch: Batch, lr: float) -> tuple[float, np.ndarray]:
        """Moves B by one step on a batch from `pack_step`. Returns the loss before, and the gradient (D,)."""
        loss = self.adapted.losses(batch, self.b.unsqueeze(0)).sum()
        (gradient,) = torch.autograd.grad(loss, self.b)
        self.b.grad = gradient
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        return float(loss.detach()), gradient.cpu().numpy()


class FullFirstOrder:
    """SGD on all parameters of the model, in place and without LoRA."""

    def __init__(self, model: Any, recipe: Recipe, shape: BaseShape) -> None:
        self.adapted = AdaptedModel(model, recipe, shape)
        self.adapted.remove()
        self._zero_b = self.adapted.zeros().unsqueeze(0)
        self.parameters = [parameter.requires_grad_() for parameter in model.parameters()]
        self._optimizer = torch.optim.SGD(self.parameters, lr=0.0)

    def step(self, batch: Batch, lr: float) -> float:
        """Every parameter -= lr * its gradient. Returns the loss before; the gradients stay on the parameters."""
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.zero_grad()
        loss = self.adapted.losses(batch, self._zero_b).sum()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


Grouping = Literal["sequential", "inner", "outer", "both"]


def passes(grouping: Grouping, queries: int) -> list[list[int]]:
    """Returns the paths of each pass, in order.

    sequential: one by one (MeZO, the paper's Algorithm 3). inner: a query's + and - together. outer: the + paths of all
    queries, then the - paths. both: all 2q at once (MobiZO, Algorithm 1).
    """
    paths = list(range(2 * queries))
    if grouping == "sequential":
        return [[path] for path in paths]
    if grouping == "inner":
        return [[query, queries + query] for query in range(queries)]
    return [paths[:queries], paths[queries:]] if grouping == "outer" else [paths]


class EagerMobizo:
    """MobiZO or MeZO on a flat vector: the model runs 2q perturbed copies of it in passes, grouped by `grouping`."""

    def __init__(self, adapted: AdaptedModel, grouping: Grouping = "both") -> None:
        self.adapted, self.recipe = adapted, adapted.recipe
        self.b = adapted.start()
        self.passes = passes(grouping, self.recipe.queries)

    @torch.no_grad()
    def step(self, batch: tuple[np.ndarray, ...], seeds: np.ndarray, lr: float, eps: float) -> tuple[Tensor, Tensor]:
        """Takes a batch from `pack_step`. Returns losses (2q,) and coefficients (q,)."""
        q = self.recipe.queries
        noise = [direction(self.recipe.noise, (int(k0), int(k1)), len(self.b)) for k0, k1 in seeds]
        z = torch.from_numpy(np.stack(noise)).to(self.b.device)  # (q, D)
        losses = torch.zeros(self.recipe.paths, device=self.b.device)
        for group in self.passes:
            paths = [self.b + (eps if path < q else -eps) * z[path % q] for path in group]
            losses[group] = self.adapted.losses(batch, torch.stack(paths)).float()
        coefficients = lr / q * (losses[:q] - losses[q:]) / (2 * eps)
        for query in range(q):
            self.b -= coefficients[query] * z[query]
        return losses, coefficients


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
        plus, minus, zero_b = [], [], self.adapted.zeros().unsqueeze(0)
        for seed in seeds:
            self._move(seed, eps)
            plus.append(self.adapted.losses(batch, zero_b))
            self._move(seed, -2 * eps)
            minus.append(self.adapted.losses(batch, zero_b))
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
