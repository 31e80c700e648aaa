"""One MobiZO step (Algorithm 1) in PyTorch eager on a stock transformers model, its paths grouped into passes."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bench.baselines.adapted import AdaptedModel
from shared.zo.noise import direction

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
    """A flat vector of trained numbers, and a model that runs its 2q perturbed copies in passes, as `grouping` says."""

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
