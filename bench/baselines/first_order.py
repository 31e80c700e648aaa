"""First-order SGD on LoRA-FA by autograd: what zeroth-order training is given up for."""

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
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def step(self, batch: tuple[np.ndarray, ...], lr: float) -> tuple[float, np.ndarray]:
        """B -= lr * gradient, on a batch as `pack_step` gives it. Returns the loss before, and the gradient (D,)."""
        loss = self.adapted.losses(batch, self.b.unsqueeze(0)).sum()
        (gradient,) = torch.autograd.grad(loss, self.b)
        with torch.no_grad():
            self.b -= lr * gradient
        return float(loss.detach()), gradient.cpu().numpy()
