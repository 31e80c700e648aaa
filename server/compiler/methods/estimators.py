"""The state of B in a program, by estimator: `replay` and `directional` keep one flat B, `stored` two copies per query.

`stored` is the paper's Mobile MP-LoRA module (Algorithm 2) for any q: a step first recovers the last step's directions
from the difference of the copies, applies the pending update to both, and perturbs them again.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from server.compiler.methods.clipping import single_rows
from server.compiler.methods.noise import directions
from server.compiler.methods.noise_operator import noise_call
from server.compiler.methods.optimizers import OptimizedB
from shared.recipe import DIRECTION_BLOCK, Estimator, Recipe

STATE = "state"  # attribute name in every method, so that all methods share one state


class FlatB(nn.Module):
    """One flat B (D,), for estimator `replay`. The update regenerates the directions (Algorithm 1 in one call)."""

    def __init__(self, recipe: Recipe, size: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.register_buffer("flat_b", torch.zeros(size))

    def current(self) -> Tensor:
        """Returns a copy of B (D,)."""
        return self.flat_b + 0.0

    def perturb(self, seeds: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the B of every path, (2q, D), and the directions (q, D) for `update`. seeds: int32 (q, 2)."""
        z = directions(self.recipe.noise, seeds, self.flat_b.shape[0])
        offset, b = z * eps, self.flat_b.unsqueeze(0)
        return torch.cat((b + offset, b - offset)), z

    def update(self, z: Tensor, coefficients: Tensor, eps: Tensor) -> Tensor:
        """Updates B -= c_i z_i for i in order, as exact replay requires. coefficients: (q,). Returns B."""
        return self.flat_b.copy_(descended(self.flat_b, z, coefficients))

    def replay(self, seeds: Tensor, coefficients: Tensor, eps: Tensor) -> Tensor:
        """Makes the update of recorded coefficients (q,). seeds: int32 (q, 2). Returns B."""
        return self.update(directions(self.recipe.noise, seeds, self.flat_b.shape[0]), coefficients, eps)

    def assign(self, b: Tensor) -> None:
        """Sets B to a copy of `b` (D,)."""
        self.flat_b.copy_(b)


def descended(b: Tensor, z: Tensor, coefficients: Tensor) -> Tensor:
    """B - c_i z_i for i in order, which exact replay requires. b: (D,). z: (n, D). coefficients: (n,)."""
    for query in range(z.shape[0]):
        b = b - z[query] * coefficients[query]
    return b


class DirectionalB(FlatB):
    """One flat B (D,), for estimator `directional`: updates along a gradient's projections on random directions.

    With q in the hundreds all directions together would be large, so they are drawn in blocks of about DIRECTION_BLOCK
    elements.
    """

    def project(self, gradient: Tensor, seeds: Tensor, lr: Tensor) -> Tensor:
        """Updates B -= c_i z_i with c_i = <g, z_i> lr / q, in order. Returns the coefficients (q,).

        These are the coefficients of `replay` in the limit eps -> 0. gradient: (D,). seeds: int32 (q, 2).
        """
        b, rate = self.flat_b, lr / self.recipe.queries
        coefficients: list[Tensor] = []
        for z, _ in self._blocks(seeds):
            coefficients.append(torch.mm(z, gradient.unsqueeze(1)).squeeze(1) * rate)
            b = descended(b, z, coefficients[-1])
        self.flat_b.copy_(b)
        return torch.cat(coefficients) if len(coefficients) > 1 else coefficients[0]

    def projections(self, gradients: Tensor, seeds: Tensor) -> Tensor:
        """The projections <g_e, z_i> of each example's gradient, (q, rows). gradients: (rows, D). seeds: int32 (q, 2).

        Each example has a product of its own, so that no other example can change its rounding.
        """
        rows = single_rows(gradients)
        blocks = [torch.cat([torch.mm(z, row.reshape(-1, 1)) for row in rows], dim=1) for z, _ in self._blocks(seeds)]
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0]

    def replay(self, seeds: Tensor, coefficients: Tensor, eps: Tensor) -> Tensor:
        """See `FlatB.replay`."""
        b = self.flat_b
        for z, part in self._blocks(seeds):
            b = descended(b, z, coefficients[part])
        return self.flat_b.copy_(b)

    def _blocks(self, seeds: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """The directions (n, D) of each block of queries, and the block's place among them."""
        size = self.flat_b.shape[0]
        count = max(1, DIRECTION_BLOCK // size)
        for start in range(0, self.recipe.queries, count):
            part = slice(start, min(start + count, self.recipe.queries))
            whole = part == slice(0, self.recipe.queries)
            yield directions(self.recipe.noise, seeds if whole else seeds[part], size), part


class StoredPairs(nn.Module):
    """Two perturbed copies per query, (2, q, D), and the pending update as multiples (q,) of their half differences.

    With c_i the last step's coefficients and eps its scale, pending_i = c_i / eps: Algorithm 2's eta g / eps, over q.
    """

    def __init__(self, recipe: Recipe, size: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.register_buffer("pairs", torch.zeros(2, recipe.queries, size))
        self.register_buffer("pending", torch.zeros(recipe.queries))

    def _differences(self) -> tuple[Tensor, Tensor]:
        """Returns the half differences eps z (q, D) and the pending update (D,): lines 2 and 3 of Algorithm 2."""
        halves = (self.pairs[0] - self.pairs[1]) * 0.5
        total = halves[0] * self.pending[0]
        for query in range(1, self.recipe.queries):
            total = total + halves[query] * self.pending[query]
        return halves, total

    def current(self) -> Tensor:
        """Returns B (D,) with the pending update applied."""
        halves, total = self._differences()
        return self.pairs[0, 0] - halves[0] - total

    def perturb(self, seeds: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the copies (2q, D) after the pending update, with new noise: lines 4 to 6 of Algorithm 2."""
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
        """Stores the update as pending for the next step. Returns the copies of the first query's plus path."""
        self.pending.copy_(coefficients / eps)
        return self.pairs[0, 0]

    def replay(self, seeds: Tensor, coefficients: Tensor, eps: Tensor) -> Tensor:
        """Perturbs the copies and leaves the update of recorded coefficients (q,) to the next step; see `update`."""
        _, z = self.perturb(seeds, eps)
        return self.update(z, coefficients, eps)

    def assign(self, b: Tensor) -> None:
        """Sets every copy to `b` (D,) and clears the pending update."""
        self.pairs.copy_(b.reshape(1, 1, -1).expand(self.pairs.shape))
        self.pending.copy_(torch.zeros_like(self.pending))


def state_of(recipe: Recipe, size: int) -> FlatB | StoredPairs | OptimizedB:
    """Returns the state of the recipe's estimator."""
    kinds: dict[Estimator, type[FlatB | StoredPairs | OptimizedB]] = {
        "replay": FlatB,
        "stored": StoredPairs,
        "gradient": OptimizedB,
        "directional": DirectionalB,
    }
    return kinds[recipe.estimator](recipe, size)
