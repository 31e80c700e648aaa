"""One MobiZO step (Algorithm 1) in PyTorch eager on a stock transformers model: what the program is timed against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.lora import BaseShape, flat_size, init_a, lora_modules
from shared.noise import direction
from shared.recipe import Recipe


class EagerMobizo:
    """B and a model whose adapted linear layers run one B per path."""

    def __init__(self, model: Any, recipe: Recipe, shape: BaseShape) -> None:
        """model: transformers' AutoModelForCausalLM in float32."""
        self.model = model.eval()
        self.recipe = recipe
        self.b = torch.zeros(flat_size(recipe, shape))
        self._paths = self.b.unsqueeze(0)  # (n, D) while a forward runs
        layers = dict(model.named_modules())
        for module in lora_modules(recipe, shape):
            a = torch.from_numpy(init_a(recipe, module)) * recipe.scale  # (in, r)
            layers[module.name].register_forward_hook(self._hook(a, module.offset, module.size))

    def _hook(self, a: Tensor, offset: int, size: int) -> Any:
        def add_lora(_module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            paths = self._paths[:, offset : offset + size].reshape(len(self._paths), self.recipe.rank, -1)
            low = (inputs[0] @ a).reshape(len(self._paths), -1, self.recipe.rank)  # (n, E*S, r)
            return output + torch.bmm(low, paths).reshape(output.shape)

        return add_lora

    @torch.no_grad()
    def step(self, batch: tuple[np.ndarray, ...], seeds: np.ndarray, lr: float, eps: float) -> tuple[Tensor, Tensor]:
        """Inputs as `pack_step` gives them for loss `candidates`. Returns losses (2q,), coefficients (q,)."""
        tokens, positions, choices, choice_mask, mask = (torch.from_numpy(array) for array in batch)
        recipe = self.recipe
        noise = [direction(recipe.noise, (int(k0), int(k1)), len(self.b)) for k0, k1 in seeds]
        z = torch.from_numpy(np.stack(noise))  # (q, D)
        self._paths = torch.cat((self.b + eps * z, self.b - eps * z))
        n = recipe.paths
        hidden = self.model.model(tokens.repeat(n, 1), use_cache=False).last_hidden_state  # (n*E, S, hidden)
        rows = torch.arange(len(hidden)).unsqueeze(1)
        answers = hidden[rows, positions.repeat(n, 1)]  # (n*E, T, hidden)
        heads = self.model.lm_head.weight[choices].repeat(n, 1, 1, 1)  # (n*E, T, C, hidden)
        logits = (heads @ answers.unsqueeze(3)).squeeze(3).masked_fill(choice_mask.repeat(n, 1, 1) == 0, -1e9)
        nll = -torch.log_softmax(logits, -1)[:, :, 0].reshape(n, -1)
        losses = (nll * mask.reshape(1, -1)).sum(1) / mask.sum()
        coefficients = lr / recipe.queries * (losses[: recipe.queries] - losses[recipe.queries :]) / (2 * eps)
        for query in range(recipe.queries):
            self.b -= coefficients[query] * z[query]
        return losses, coefficients
