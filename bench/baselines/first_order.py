"""First-order SGD by autograd, on LoRA-FA and on all parameters: what zeroth-order training is given up for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bench.baselines.adapted import AdaptedModel
from shared.lora import BaseShape
from shared.recipe import Recipe


class FirstOrder:
    """B, and a model that differentiates the loss of one copy of it."""

    def __init__(self, model: Any, recipe: Recipe, shape: BaseShape, *, checkpointing: bool = False) -> None:
        """model: transformers' AutoModelForCausalLM. checkpointing: activations of a layer are computed again."""
        self.adapted = AdaptedModel(model, recipe, shape)
        self.b = self.adapted.zeros().requires_grad_()
        if checkpointing:
            # Recomputation is of training mode alone; these models have no dropout to switch on.
            model.train()
            model.activation_checkpointing_enable({"use_reentrant": False})

    def step(self, batch: tuple[np.ndarray, ...], lr: float) -> tuple[float, np.ndarray]:
        """B -= lr * gradient, on a batch as `pack_step` gives it. Returns the loss before, and the gradient (D,)."""
        loss = self.adapted.losses(batch, self.b.unsqueeze(0)).sum()
        (gradient,) = torch.autograd.grad(loss, self.b)
        with torch.no_grad():
            self.b -= lr * gradient
        return float(loss.detach()), gradient.cpu().numpy()


class FullFirstOrder:
    """A model that differentiates its loss by all its parameters; there is no LoRA."""

    def __init__(self, model: Any, recipe: Recipe, shape: BaseShape) -> None:
        """model: transformers' AutoModelForCausalLM, changed where it lies."""
        self.adapted = AdaptedModel(model, recipe, shape)
        self.adapted.remove()
        self._nothing = self.adapted.zeros().unsqueeze(0)
        self.parameters = [parameter.requires_grad_() for parameter in model.parameters()]
        self._optimizer = torch.optim.SGD(self.parameters, lr=0.0)

    def step(self, batch: tuple[np.ndarray, ...], lr: float) -> float:
        """Every parameter -= lr * its gradient. Returns the loss before; the gradients stay on the parameters."""
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.zero_grad()
        loss = self.adapted.losses(batch, self._nothing).sum()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())
