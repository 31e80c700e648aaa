"""First-order training by autograd, on LoRA-FA and on all parameters."""

from typing import Any

import numpy as np
import torch

from bench.baselines.adapted import AdaptedModel
from bench.programs import Batch
from server.compiler.methods.optimizers import BETAS, MOMENTUM, STABILITY
from shared.recipe import Recipe
from shared.zo.calibration import Calibration
from shared.zo.lora import BaseShape


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
        self._nothing = self.adapted.zeros().unsqueeze(0)
        self.parameters = [parameter.requires_grad_() for parameter in model.parameters()]
        self._optimizer = torch.optim.SGD(self.parameters, lr=0.0)

    def step(self, batch: Batch, lr: float) -> float:
        """Every parameter -= lr * its gradient. Returns the loss before; the gradients stay on the parameters."""
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.zero_grad()
        loss = self.adapted.losses(batch, self._nothing).sum()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())
