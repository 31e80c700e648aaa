"""B as a program holds it, for each estimator: `replay` keeps one flat B, `stored` two copies a query.

`stored` is the paper's Mobile MP-LoRA module (Algorithm 2) for any q: a step first recovers the last step's directions
from the difference of the copies, moves both by the update that was left to do, and perturbs them anew. Knows flat
vectors only: no model, no loss, no files.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import torch
from torch import Tensor, nn

from server.compiler.noise import directions
from server.compiler.noise_operator import noise_call
from shared.recipe import Recipe

STATE = "state"  # under which every method holds it, so that all share one
BUFFERS = {"replay": ("flat_b",), "stored": ("pairs", "pending")}


class FlatB(nn.Module):
    """One B (D,). Directions are drawn again for the update (Algorithm 1 in one call)."""

    def __init__(self, recipe: Recipe, size: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.register_buffer("flat_b", torch.zeros(size))

    def current(self) -> Tensor:
        """A copy of B (D,)."""
        return self.flat_b + 0.0

    def perturb(self, seeds: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Every path's B (2q, D), and the directions (q, D) for `update`. seeds: int32 (q, 2)."""
        z = directions(self.recipe.noise, seeds, self.flat_b.shape[0])
        offset, b = z * eps, self.flat_b.unsqueeze(0)
        return torch.cat((b + offset, b - offset)), z

    def update(self, z: Tensor, coefficients: Tensor, eps: Tensor) -> Tensor:
        """B -= c_i z_i for i in order, which exact replay needs. coefficients: (q,). Returns B."""
        b = self.flat_b
        for query in range(self.recipe.queries):
            b = b - z[query] * coefficients[query]
        return self.flat_b.copy_(b)

    def assign(self, b: Tensor) -> None:
        """Makes B a copy of `b` (D,)."""
        self.flat_b.copy_(b)


class StoredPairs(nn.Module):
    """Two perturbed copies a query, (2, q, D), and the update still to do, as multiples (q,) of their half differences.

    With c_i the last step's coefficients and eps its scale, pending_i = c_i / eps: Algorithm 2's eta g / eps, over q.
    """

    def __init__(self, recipe: Recipe, size: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.register_buffer("pairs", torch.zeros(2, recipe.queries, size))
        self.register_buffer("pending", torch.zeros(recipe.queries))

    def _differences(self) -> tuple[Tensor, Tensor]:
        """Half differences (q, D), which are eps z, and the pending update (D,): Algorithm 2's lines 2 and 3."""
        halves = (self.pairs[0] - self.pairs[1]) * 0.5
        total = halves[0] * self.pending[0]
        for query in range(1, self.recipe.queries):
            total = total + halves[query] * self.pending[query]
        return halves, total

    def current(self) -> Tensor:
        """B (D,) with the pending update applied."""
        halves, total = self._differences()
        return self.pairs[0, 0] - halves[0] - total

    def perturb(self, seeds: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """The copies (2q, D) after the pending update and with new noise: Algorithm 2's lines 4 to 6."""
        halves, total = self._differences()
        queries, size = halves.shape
        match self.recipe.noise:
            case "randn":
                noise = torch.randn((queries, size))
            case "operator":
                noise = noise_call(seeds, size)
            case seeded:
                noise = directions(seeded, seeds, size)
        z = noise * eps
        plus = self.pairs[0] - halves - total + z
        minus = self.pairs[1] + halves - total - z
        self.pairs.copy_(torch.stack((plus, minus)))
        return torch.cat((plus, minus)), z

    def update(self, z: Tensor, coefficients: Tensor, eps: Tensor) -> Tensor:
        """Leaves the update to the next step. Returns the copies of the first query's plus path."""
        self.pending.copy_(coefficients / eps)
        return self.pairs[0, 0]

    def assign(self, b: Tensor) -> None:
        """Makes every copy `b` (D,), with nothing pending."""
        self.pairs.copy_(b.reshape(1, 1, -1).expand(self.pairs.shape))
        self.pending.copy_(torch.zeros_like(self.pending))


def state_of(recipe: Recipe, size: int) -> FlatB | StoredPairs:
    """B as the recipe's estimator holds it."""
    return (StoredPairs if recipe.estimator == "stored" else FlatB)(recipe, size)
