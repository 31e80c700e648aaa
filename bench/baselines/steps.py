"""Steps of the baselines in PyTorch, on a stock transformers model: first order, MeZO and MobiZO."""

from typing import Any

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
        return float(loss.detach()), gradient.numpy()


class EagerMobizo:
    """MobiZO or, with one path at a time, MeZO (the paper's Algorithm 3) on a flat vector B (D,)."""

    def __init__(self, adapted: AdaptedModel, paths_at_once: int) -> None:
        """paths_at_once: perturbed copies of B that the model runs together, of the 2q of a step."""
        self.adapted, self.recipe, self._at_once = adapted, adapted.recipe, paths_at_once
        self.b = adapted.zeros()

    @torch.no_grad()
    def step(self, batch: tuple[np.ndarray, ...], seeds: np.ndarray, lr: float, eps: float) -> tuple[Tensor, Tensor]:
        """Takes a batch from `pack_step`. Returns losses (2q,) and coefficients (q,)."""
        q = self.recipe.queries
        noise = [direction(self.recipe.noise, (int(k0), int(k1)), len(self.b)) for k0, k1 in seeds]
        z = torch.from_numpy(np.stack(noise))  # (q, D)
        paths = torch.cat((self.b + eps * z, self.b - eps * z))  # (2q, D)
        losses = torch.cat([self.adapted.losses(batch, together) for together in paths.split(self._at_once)])
        coefficients = lr / q * (losses[:q] - losses[q:]) / (2 * eps)
        for query in range(q):
            self.b -= coefficients[query] * z[query]
        return losses, coefficients
