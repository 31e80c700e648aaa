"""The state of B in a program, by estimator: `replay` and `directional` keep one flat B, `stored` two copies per query.

`directional` keeps its optimizer's state beside B.

`stored` is the paper's Mobile MP-LoRA module (Algorithm 2) for any q: a step first recovers the last step's directions
from the difference of the copies, applies the pending update to both, and perturbs them again.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from server.compiler.methods.noise import directions
from server.compiler.methods.noise_operator import noise_call
from server.compiler.methods.optimizers import OptimizedB
from server.compiler.methods.private_gradient import single_rows
from shared.recipe import MAX_PATH_QUERIES, Estimator, Recipe, directions_at_once

SUMMED, FEWEST_SUMMED = 32, 4  # directions of a cumulative sum; with fewer, single differences are no more operations
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
        """Returns the B of every path, (2q, D), and the directions (q, D) for `update`. seeds: int32 (q, 2).

        (q, D), B + eps z alone, where the answer's positions alone are perturbed.
        """
        z = directions(self.recipe.noise, seeds, self.flat_b.shape[0])
        offset, b = z * eps, self.flat_b.unsqueeze(0)
        return b + offset if self.recipe.perturbed == "answers" else torch.cat((b + offset, b - offset)), z

    def update(self, z: Tensor, coefficients: Tensor, eps: Tensor) -> Tensor:
        """Updates B -= c_i z_i for i in order, as exact replay requires. coefficients: (q,). Returns B."""
        few = z.shape[0] <= MAX_PATH_QUERIES
        return self.flat_b.copy_((descended if few else descended_by_sums)(self.flat_b, z, coefficients))

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


def descended_by_sums(b: Tensor, z: Tensor, coefficients: Tensor) -> Tensor:
    """The same to the bit where a cumulative sum of float32 is computed in order and in float32.

    That is so in ExecuTorch, whose programs and compilations become smaller by it: six operations for SUMMED directions
    and not three for each. ATen computes the sums in float64. b: (D,). z: (n, D). coefficients: (n,).
    """
    size = min(SUMMED, -(-z.shape[0] // 4))  # so that memory does not grow by more than a quarter of z, three times
    if size < FEWEST_SUMMED:
        return descended(b, z, coefficients)
    for start in range(0, z.shape[0], size):
        part = slice(start, start + size)
        moves = z[part] * -coefficients[part].unsqueeze(1)
        b = torch.cumsum(torch.cat((b.unsqueeze(0), moves)), dim=0)[-1]
    return b


@dataclass(frozen=True)
class Directions:
    """The seeded directions of one step: z_i (D,), i < q.

    With q in the hundreds all of them together would be large, so they are drawn in blocks. An ExecuTorch program loops
    over them, because each copy of the generator is 130 operations.
    seeds: int32 (q, 2). size: D.
    """

    recipe: Recipe
    seeds: Tensor
    size: int

    def project(self, b: Tensor, descent: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        """B - c_i z_i with c_i = <u, z_i> lr / q, in order, and the coefficients (q,). b: (D,). descent: u (D,).

        With the gradient as u these are the coefficients of `replay` in the limit eps -> 0.
        """
        rate = lr / self.recipe.queries

        def project_block(b: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
            z = self._drawn(seeds)
            coefficients = torch.mm(z, descent.unsqueeze(1)).squeeze(1) * rate
            return self._descended(b, z, coefficients), coefficients

        return self._fold(project_block, b, self.seeds)

    def replay(self, b: Tensor, coefficients: Tensor) -> Tensor:
        """B - c_i z_i for recorded coefficients (q,), in order. b: (D,)."""

        def replay_block(b: Tensor, seeds: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
            return self._descended(b, self._drawn(seeds), coefficients), coefficients + 0.0

        return self._fold(replay_block, b, self.seeds, coefficients)[0]

    def projections(self, gradients: Tensor) -> Tensor:
        """<g_e, z_i> of each example's gradient, (q, rows). gradients: (rows, D).

        Each example has a product of its own, so that no other example can change its rounding.
        """

        def project_rows(unused: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
            z = self._drawn(seeds)
            return unused + 0.0, torch.cat([torch.mm(z, row.reshape(-1, 1)) for row in single_rows(gradients)], dim=1)

        return self._fold(project_rows, torch.zeros(1), self.seeds)[1]

    def _fold(self, step: Callable[..., tuple[Tensor, Tensor]], start: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """Carries `start` through the blocks of `rows` (q, ...) in order. Returns it, and every block's rows together.

        step: takes what is carried and a block of each of `rows`; returns what is carried on and a block of rows.
        """
        queries, looped = self.recipe.queries, self.recipe.backend != "torch"
        count = directions_at_once(queries, self.size, looped=looped)
        if count >= queries:
            return step(start, *rows)
        if looped and torch.compiler.is_exporting():
            whole = queries - queries % count
            in_loop = rows if whole == queries else [row[:whole] for row in rows]
            blocks = [row.reshape(whole // count, count, *row.shape[1:]) for row in in_loop]
            carried, results = scan(lambda carry, block: step(carry, *block), start + 0.0, blocks)
            looped_rows = (results + 0.0).reshape(whole, *results.shape[2:])  # a sum, as results have no views
            if whole == queries:
                return carried, looped_rows
            carried, rest = step(carried, *(row[whole:] for row in rows))
            return carried, torch.cat((looped_rows, rest))
        carried, parts = start, list[Tensor]()
        for at in range(0, queries, count):
            carried, part = step(carried, *(row[at : at + count] for row in rows))
            parts.append(part)
        return carried, torch.cat(parts)

    def _drawn(self, seeds: Tensor) -> Tensor:
        return directions(self.recipe.noise, seeds, self.size)

    def _descended(self, b: Tensor, z: Tensor, coefficients: Tensor) -> Tensor:
        return (descended if self.recipe.backend == "torch" else descended_by_sums)(b, z, coefficients)


class DirectionalB(FlatB):
    """One flat B (D,), for estimator `directional`: updates along a gradient's projections on random directions."""

    def project(self, gradient: Tensor, seeds: Tensor, lr: Tensor) -> Tensor:
        """Updates B by a gradient's projections; see `Directions.project`. Returns the coefficients (q,)."""
        b, coefficients = self._directions(seeds).project(self.flat_b, gradient, lr)
        self.flat_b.copy_(b)
        return coefficients

    def projections(self, gradients: Tensor, seeds: Tensor) -> Tensor:
        """See `Directions.projections`. seeds: int32 (q, 2)."""
        return self._directions(seeds).projections(gradients)

    def replay(self, seeds: Tensor, coefficients: Tensor, eps: Tensor) -> Tensor:
        """See `FlatB.replay`."""
        return self.flat_b.copy_(self._directions(seeds).replay(self.flat_b, coefficients))

    def _directions(self, seeds: Tensor) -> Directions:
        return Directions(self.recipe, seeds, self.flat_b.shape[0])


class ProjectedB(OptimizedB):
    """B (D,) and an optimizer's state, for estimator `directional`: updates along projections of its direction.

    The optimizer's state follows the exact gradients, and B follows the recorded coefficients.
    """

    def project(self, gradient: Tensor, seeds: Tensor, lr: Tensor) -> Tensor:
        """Updates B by the projections of the optimizer's direction, and its state. Returns the coefficients (q,)."""
        descent, state = self.direction(gradient)
        b, coefficients = Directions(self.recipe, seeds, self.size).project(self.current(), descent, lr)
        self.optimized.copy_(torch.cat((b, *state)))
        return coefficients

    def replay(self, seeds: Tensor, coefficients: Tensor, eps: Tensor) -> Tensor:
        """Updates B by recorded coefficients (q,); the optimizer's state does not change. Returns both."""
        b = Directions(self.recipe, seeds, self.size).replay(self.current(), coefficients)
        return self.optimized.copy_(torch.cat((b, self.optimized[self.size :])))


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
        "directional": ProjectedB if recipe.keeps_optimizer else DirectionalB,
    }
    return kinds[recipe.estimator](recipe, size)
