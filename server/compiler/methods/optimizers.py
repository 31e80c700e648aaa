"""B and an optimizer's state as one flat vector, and its update from a gradient (estimators `gradient` and
`directional`).

One buffer holds everything that a step changes, so that all methods share it, a checkpoint is one vector, and zeros are
its beginning.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import torch
from torch import Tensor, nn

from server.compiler.methods.step_inputs import StepInputs
from shared.recipe import Optimizer, Recipe

MOMENTUM = 0.9
BETAS = (0.9, 0.999)  # of Adam's first and second moments
STABILITY = 1e-8  # added to the root of Adam's second moment
VECTORS: dict[Optimizer, int] = {"sgd": 1, "momentum": 2, "adam": 3}  # of D elements: B, then moments
SCALARS: dict[Optimizer, int] = {"sgd": 0, "momentum": 0, "adam": 2}  # after them


def state_size(optimizer: Optimizer, size: int) -> int:
    """Elements of B (D,) and the optimizer's state together."""
    return VECTORS[optimizer] * size + SCALARS[optimizer]


def clipped(gradient: Tensor, max_norm: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient (D,) scaled so that its L2 norm is at most `max_norm` [1], and its norm [1] before."""
    norm = torch.sqrt((gradient * gradient).sum(dim=0, keepdim=True))
    return gradient * torch.clamp(max_norm / (norm + 1e-6), max=1.0), norm


class OptimizedB(nn.Module):
    """B (D,), followed by the optimizer's state, in one buffer.

    sgd: nothing more. momentum: the velocity (D,). adam: both moments (D,) each, then the weight that each moment's
    average has gathered so far, 1 - beta^t; dividing by it corrects the bias towards the zeros of the beginning.
    """

    def __init__(self, recipe: Recipe, size: int) -> None:
        """size: D."""
        super().__init__()
        self.recipe, self.optimizer, self.size = recipe, recipe.optimizer, size
        self.register_buffer("optimized", torch.zeros(state_size(recipe.optimizer, size)))

    def part(self, index: int) -> Tensor:
        """A copy of one vector (D,): 0 is B."""
        if self.optimizer == "sgd":
            return self.optimized + 0.0  # a slice of everything would be no copy
        return self.optimized[index * self.size : (index + 1) * self.size] + 0.0

    def current(self) -> Tensor:
        """A copy of B (D,)."""
        return self.part(0)

    def assign(self, b: Tensor) -> None:
        """Makes B a copy of `b` (D,) and begins the optimizer anew."""
        more = len(self.optimized) - self.size
        self.optimized.copy_(torch.cat((b, torch.zeros(more))) if more else b)

    def update(self, gradient: Tensor, rates: StepInputs, last: Tensor | None = None) -> Tensor:
        """One step of the optimizer with the mean gradient (D,). Returns the gradient's norm [1] before it was clipped.

        last: [1]; with 0 nothing changes, because more examples of the step follow. Adam is Kingma and Ba's (2015)
        Algorithm 1.
        """
        gradient, norm = clipped(gradient, rates.max_norm)
        moved = self.moved(gradient, rates)
        self.optimized.copy_(moved if last is None else torch.where(last > 0, moved, self.optimized))
        return norm

    def moved(self, gradient: Tensor, rates: StepInputs) -> Tensor:
        """B and the optimizer's state after one step with a gradient (D,)."""
        b = self.current()
        b = b - b * (rates.lr * rates.weight_decay)
        direction, state = self.direction(gradient)
        b = b - direction * rates.lr
        return torch.cat((b, *state)) if state else b

    def direction(self, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The direction of descent (D,), and the optimizer's state after a step with a gradient (D,).

        At a learning rate of 1 the optimizer subtracts the direction from B.
        """
        if self.optimizer == "sgd":
            return gradient, []
        if self.optimizer == "momentum":
            velocity = self.part(1) * MOMENTUM + gradient
            return velocity, [velocity]
        first = self.part(1) * BETAS[0] + gradient * (1 - BETAS[0])
        second = self.part(2) * BETAS[1] + gradient * gradient * (1 - BETAS[1])
        at = VECTORS["adam"] * self.size
        weights = [self.optimized[at + index : at + index + 1] * beta + (1 - beta) for index, beta in enumerate(BETAS)]
        direction = (first / weights[0]) / (torch.sqrt(second / weights[1]) + STABILITY)
        return direction, [first, second, *weights]
