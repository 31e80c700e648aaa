"""The measurements of `bench variance`: moments of B's gradient by A, layers and loss; directions; precisions.

Every number is of B = 0, where training starts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from bench.baselines.adapted import AdaptedModel
from bench.baselines.rounding import rounded
from bench.variance import choices_of_a
from bench.variance.data import Bench
from bench.variance.estimator import cosines_squared, means_of_runs
from bench.variance.gradients import LayerSums, LinearGradients, MomentRecorder, layer_sums, record
from shared.recipe import DEFAULT_EPS, Precision
from shared.zo.encoding import Arrays, Example
from shared.zo.lora import LoraModule, init_a, lora_modules
from shared.zo.noise import direction, query_seeds

RANKS = (1, 4, 16)
QUERIES = (1, 2, 4, 8, 16)
PATHS = 4  # directions whose two copies of B run at once
RANDOM, ORTHOGONAL = "random (the paper's)", "random, orthogonal"
PROXY_GRADIENTS, OWN_GRADIENTS = "proxy gradients", "own gradients"
Columns = dict[str, np.ndarray]  # (in, R) by layer


@dataclass(frozen=True)
class Measured:
    """Recorded moments, and their layers."""

    recorder: MomentRecorder
    modules: tuple[LoraModule, ...]

    def names(self, targets: Sequence[str], layers: Sequence[int]) -> list[str]:
        """Returns the names of some targets in some decoder layers."""
        return [module.name for module in self.modules if module.target in targets and module.layer in layers]

    def size(self, rank: int, layers: Sequence[str]) -> int:
        """Returns D: the elements of these layers' B at a rank."""
        return rank * sum(module.out_features for module in self.modules if module.name in layers)


def energy_of(bench: Bench) -> float:
    """Returns the mean |s A|_F^2 of a layer of the recipe's random A; every choice and rank has the same energy."""
    return bench.recipe.scale**2 * bench.recipe.rank / 3


def every_linear(bench: Bench) -> tuple[LoraModule, ...]:
    """Returns all linear layers of the decoder."""
    recipe = bench.recipe.model_copy(update={"targets": bench.shape.linears, "layers": "all"})
    return lora_modules(recipe, bench.shape)


def sums_of(bench: Bench, examples: list[Example]) -> LayerSums:
    """Sums gradients of every linear layer, and activations of those that the recipe adapts."""
    with bound(bench) as gradients:
        return layer_sums(gradients, bench.batches(examples), bench.recipe.targets)


def choices_for(bench: Bench, own: LayerSums, proxy: LayerSums) -> dict[str, Columns]:
    """Returns every way to choose A of the layers that the recipe adapts."""
    modules, rank, recipe = lora_modules(bench.recipe, bench.shape), bench.recipe.rank, bench.recipe
    activations, gradients = choices_of_a.top_activations, choices_of_a.top_gradient
    found: dict[str, Columns] = {
        RANDOM: {m.name: init_a(recipe, m) for m in modules},
        ORTHOGONAL: {m.name: choices_of_a.orthogonal(recipe, m) for m in modules},
    }
    for whose, sums in (("proxy", proxy), ("own", own)):
        found[f"{whose} activations"] = {m.name: activations(sums.activations[m.name], rank) for m in modules}
        found[f"{whose} gradients"] = {m.name: gradients(sums.gradients[m.name], rank) for m in modules}
    return found


def target_choices(bench: Bench, proxy: LayerSums) -> dict[str, Columns]:
    """Returns random A and A from proxy gradients, of every linear layer."""
    modules, rank = every_linear(bench), bench.recipe.rank
    return {
        RANDOM: {m.name: init_a(bench.recipe, m) for m in modules},
        PROXY_GRADIENTS: {m.name: choices_of_a.top_gradient(proxy.gradients[m.name], rank) for m in modules},
    }


def moments_of(bench: Bench, examples: list[Example], *choices: dict[str, Columns]) -> list[Measured]:
    """Records the moments for each set of choices, in one pass."""
    recorders = [MomentRecorder(of, RANKS, energy_of(bench)) for of in choices]
    with bound(bench) as gradients:
        record(gradients, bench.batches(examples), recorders)
    modules = every_linear(bench)
    return [
        Measured(recorder, tuple(m for m in modules if m.name in next(iter(of.values()))))
        for recorder, of in zip(recorders, choices, strict=True)
    ]


@contextmanager
def bound(bench: Bench) -> Iterator[LinearGradients]:
    """Yields the gradients of the model's linear layers."""
    adapted = AdaptedModel(bench.model, bench.recipe, bench.shape)
    gradients = LinearGradients(adapted, every_linear(bench))
    try:
        yield gradients
    finally:
        gradients.remove()
        adapted.remove()


def batch_gradient(bench: Bench, batch: Arrays) -> np.ndarray:
    """Returns the gradient of a packed batch's loss with respect to B, by autograd: float64 (D,)."""
    adapted = AdaptedModel(bench.model, bench.recipe, bench.shape)
    b = adapted.zeros().requires_grad_()
    (gradient,) = torch.autograd.grad(adapted.losses(batch, b.unsqueeze(0)).sum(), b)
    adapted.remove()
    found: np.ndarray = gradient.double().cpu().numpy()
    return found


def mean_gradient(bench: Bench, sums: LayerSums, count: int) -> np.ndarray:
    """Returns the gradient of B under the recipe's own A, from the sums of `count` examples: float64 (D,)."""
    parts = []
    for module in lora_modules(bench.recipe, bench.shape):
        a = torch.from_numpy(init_a(bench.recipe, module)).double() * bench.recipe.scale
        parts.append((a.T @ sums.gradients[module.name].double().cpu() / count).flatten().numpy())
    return np.concatenate(parts)


@dataclass(frozen=True)
class Directions:
    """Alignment and variance by q, for one kind of noise, on the gradient g of one batch.

    alignment: mean cos^2 of the estimate and g by q. alignment_with_mean: the same with the many-example gradient.
    variance: mean |estimate - g|^2 / |g|^2 by q.
    """

    noise: str
    alignment: dict[int, float]
    alignment_with_mean: dict[int, float]
    variance: dict[int, float]


def directions_of(noise: str, gradient: np.ndarray, mean: np.ndarray, count: int) -> Directions:
    """Measures on `count` directions, a multiple of 16, that every q shares; slopes are exact (eps -> 0)."""
    most = max(QUERIES)
    sums: dict[str, dict[int, list[float]]] = {name: {q: [] for q in QUERIES} for name in ("own", "mean", "variance")}
    for run in range(count // most):
        z = np.stack([direction(noise, (int(a), int(b)), len(gradient)) for a, b in query_seeds(11, run, most)])
        slopes = z.astype(np.float64) @ gradient
        for q in QUERIES:
            estimates = means_of_runs(z, slopes, q)
            sums["own"][q] += list(cosines_squared(estimates, gradient))
            sums["mean"][q] += list(cosines_squared(estimates, mean))
            sums["variance"][q] += list(((estimates - gradient) ** 2).sum(1) / (gradient @ gradient))
    averages = {name: {q: float(np.mean(values)) for q, values in of.items()} for name, of in sums.items()}
    return Directions(noise, averages["own"], averages["mean"], averages["variance"])


@dataclass(frozen=True)
class FiniteDifferences:
    """A precision's projected gradients g against float32's exact slopes z.g_E of the same directions.

    correlation, slope: of g over the exact ones. variance: mean g^2 over |g_E|^2, 1 if it were exact. curvature: mean
    z^T H z by second differences, which estimates tr H.
    """

    precision: Precision
    eps: float
    correlation: float
    slope: float
    variance: float
    curvature: float


def finite_differences(
    bench: Bench, batches: Sequence[Arrays], gradients: Sequence[np.ndarray], precision: Precision, count: int
) -> FiniteDifferences:
    """Measures `count` Rademacher directions on each batch, PATHS pairs at once. gradients: float32's."""
    eps = DEFAULT_EPS[precision]
    exact, found, bends = [], [], []
    with rounded(bench.model, bench.shape, precision), torch.no_grad():
        adapted = AdaptedModel(bench.model, bench.recipe, bench.shape)
        for number, (batch, gradient) in enumerate(zip(batches, gradients, strict=True)):
            middle = float(adapted.losses(batch, adapted.zeros().unsqueeze(0))[0])
            for part in range(count // PATHS):
                seeds = query_seeds(13, number * count + part, PATHS)
                z = np.stack([direction("rademacher", (int(a), int(b)), adapted.size) for a, b in seeds])
                steps = torch.from_numpy(z).to(adapted.device) * eps
                losses = adapted.losses(batch, torch.cat((steps, -steps))).double().cpu().numpy().reshape(2, PATHS)
                found.append((losses[0] - losses[1]) / (2 * eps))
                bends.append((losses[0] + losses[1] - 2 * middle) / eps**2)
                exact.append(z.astype(np.float64) @ gradient)
        adapted.remove()
    g, slopes = np.concatenate(found), np.concatenate(exact)
    squared = float(np.mean([gradient @ gradient for gradient in gradients]))
    return FiniteDifferences(
        precision,
        eps,
        float(np.corrcoef(slopes, g)[0, 1]),
        float(g @ slopes / (slopes @ slopes)),
        float(np.mean(g**2)) / squared,
        float(np.mean(np.concatenate(bends))),
    )
