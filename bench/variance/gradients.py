"""Gradients of single examples with respect to frozen linear layers, and their moments seen through any A.

With LoRA-FA a layer computes xW + s (xA) B, so at B = 0 the gradient of B is s A^T G, G = dL/dW (in, out): one backward
pass gives it for every A, rank and choice of layers at once. Moments are sums over layers, so any subset of layers is a
partial sum. Everything is measured at B = 0.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from bench.baselines.adapted import AdaptedModel
from shared.recipe import Target
from shared.zo.encoding import Arrays
from shared.zo.lora import LoraModule

Visit = Callable[[LoraModule, Tensor, Tensor], None]


class LinearGradients:
    """Calls a visitor for chosen linear layers of a model, with the input and the gradient of the output."""

    def __init__(self, adapted: AdaptedModel, modules: Sequence[LoraModule]) -> None:
        """modules: the layers, which need not be those that the recipe adapts."""
        self._adapted = adapted
        self._visit: Visit | None = None
        self._real = torch.empty(0)
        self._embedded = torch.empty(0)
        layers = dict(adapted.model.named_modules())
        self._handles = [layers[module.name].register_forward_hook(self._hook(module)) for module in modules]
        self._handles.append(adapted.model.get_input_embeddings().register_forward_hook(self._keep_embedded))

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def run(self, batch: Arrays, visit: Visit) -> float:
        """Runs forward and back over a packed batch whose rows are all used. Returns its loss.

        visit: called for each layer with x (E, S, in), zero where a row is padded, and dy (E, S, out), the gradient of
        the sum over examples: example e's dL/dW is x[e]^T dy[e], and E times the batch loss's gradient is their sum.
        """
        positions = torch.from_numpy(batch[1]).to(self._adapted.device)
        places = torch.arange(batch[0].shape[1], device=self._adapted.device)
        self._real = places <= positions.amax(1, keepdim=True)  # (E, S)
        self._visit = visit
        loss = self._adapted.losses(batch, self._adapted.zeros().unsqueeze(0)).sum()
        torch.autograd.grad(loss * len(positions), self._embedded)
        self._visit = None
        return float(loss.detach())

    def _keep_embedded(self, _module: object, _inputs: object, output: Tensor) -> None:
        # All weights are frozen; gradients flow because the embeddings require one.
        if self._visit is not None:
            self._embedded = output.requires_grad_()

    def _hook(self, module: LoraModule) -> Callable[[object, tuple[Tensor, ...], Tensor], None]:
        def watch(_module: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            visit = self._visit
            if visit is not None:
                x = inputs[0].detach() * self._real.unsqueeze(2)
                output.register_hook(lambda dy: visit(module, x, dy))

        return watch


@dataclass(frozen=True)
class LayerSums:
    """Sums over examples, by layer's name: gradients dL/dW (in, out), and x^T x (in, in) of some layers."""

    gradients: dict[str, Tensor]
    activations: dict[str, Tensor]


def layer_sums(gradients: LinearGradients, batches: Iterable[Arrays], activations: Container[Target]) -> LayerSums:
    """Sums over packed batches. activations: the targets whose x^T x is needed."""
    found = LayerSums({}, {})

    def visit(module: LoraModule, x: Tensor, dy: Tensor) -> None:
        tokens = x.flatten(0, 1)
        _add(found.gradients, module.name, tokens.T @ dy.flatten(0, 1))
        if module.target in activations:
            _add(found.activations, module.name, tokens.T @ tokens)

    for batch in batches:
        gradients.run(batch, visit)
    return found


def _add(sums: dict[str, Tensor], name: str, term: Tensor) -> None:
    sums[name] = sums[name] + term if name in sums else term


@dataclass(frozen=True)
class Moments:
    """Moments of B's gradient g_e of one example, which decide how fast a zeroth-order step can descend.

    signal: |E g_e|^2, unbiased. total: E |g_e|^2, the trace of the second moment F = E g_e g_e^T. square: tr F^2.
    along: g^T F g, g = E g_e. The last two are unbiased, from pairs and triples of a batch.
    """

    signal: float
    total: float
    square: float
    along: float

    @property
    def known(self) -> bool:
        """Returns whether enough examples were seen to tell the mean gradient from noise."""
        return self.signal > 0

    @property
    def noise(self) -> float:
        """Returns the trace of one example's covariance."""
        return self.total - self.signal

    @property
    def effective_dimension(self) -> float:
        """Returns (tr F)^2 / tr F^2, the number of equal directions with the same spread of gradients."""
        return self.total**2 / self.square


class MomentRecorder:
    """Records moments of g_e = (scaled A)^T G_e for many A at once, each with its first r columns for r in `ranks`."""

    def __init__(self, choices: Mapping[str, Mapping[str, np.ndarray]], ranks: Sequence[int], energy: float) -> None:
        """choices: by name, each layer's columns (in, R), most important first; energy: the |sA|_F^2 of every layer."""
        self.names, self.ranks = list(choices), list(ranks)
        layers = next(iter(choices.values()))
        stacked = {layer: np.stack([choices[name][layer] for name in choices]) for layer in layers}
        self._columns = {layer: torch.from_numpy(columns) for layer, columns in stacked.items()}  # (n, in, R)
        norms = {layer: (columns**2).sum(1).cumsum(1) for layer, columns in stacked.items()}
        self._scales = {
            layer: energy / norm[:, np.array(self.ranks) - 1].astype(np.float64) for layer, norm in norms.items()
        }  # (n, ranks): factors of the bare columns' energies
        self._sums: dict[str, list[Tensor]] = {layer: [torch.zeros(0), torch.zeros(0)] for layer in layers}
        self._grams: list[dict[str, np.ndarray]] = []
        self._counts, self._half = [0, 0], 0

    def begin(self, examples: int) -> None:
        """Begins a batch of at least three examples; odd and even batches are two independent samples."""
        self._half = len(self._grams) % 2
        self._grams.append({})
        self._counts[self._half] += examples

    def visit(self, module: LoraModule, x: Tensor, dy: Tensor) -> None:
        """Records one layer of the batch, from `LinearGradients`; layers without columns are skipped."""
        if module.name not in self._columns:
            return
        columns = self._columns[module.name].to(x.device)
        n, _, rank = columns.shape
        low = x @ columns.permute(1, 0, 2).flatten(1)  # (E, S, n R)
        g = (low.transpose(1, 2) @ dy).reshape(len(x), n, rank, -1).permute(1, 2, 0, 3)  # (n, R, E, out)
        sums = self._sums[module.name]
        sums[self._half] = g.sum(2) + (sums[self._half] if len(sums[self._half]) else 0)  # (n, R, out)
        gram = (g @ g.transpose(2, 3)).cumsum(1)[:, [r - 1 for r in self.ranks]]  # (n, ranks, E, E)
        scale = self._scales[module.name]
        self._grams[-1][module.name] = gram.cpu().numpy() * scale[:, :, None, None].astype(np.float32)

    def columns(self, name: str) -> dict[str, np.ndarray]:
        """Returns one choice's columns (in, R) by layer."""
        at = self.names.index(name)
        return {layer: columns[at].numpy() for layer, columns in self._columns.items()}

    def product(self, other: Self, name: str, rank: int, layers: Iterable[str]) -> float:
        """Returns the unbiased inner product of the mean gradient with `other`'s, over the same examples and batches.

        other: has the same choices and ranks, for another loss; with this recorder itself the result is |E g_e|^2.
        """
        n, at = self.names.index(name), self.ranks.index(rank)
        total = 0.0
        for layer in layers:
            (a, b), (c, d) = ([half[n, :rank] for half in sums[layer]] for sums in (self._sums, other._sums))
            total += float((a * d).sum() + (b * c).sum()) / 2 * float(self._scales[layer][n, at])
        return total / (self._counts[0] * self._counts[1])

    def moments(self, name: str, rank: int, layers: Iterable[str]) -> Moments:
        """Returns the moments of one choice of A at one rank over a set of layers."""
        n, at = self.names.index(name), self.ranks.index(rank)
        layers = list(layers)
        grams = [sum(gram[layer][n, at].astype(np.float64) for layer in layers) for gram in self._grams]
        return Moments(self.product(self, name, rank, layers), *pair_moments(grams))


def record(gradients: LinearGradients, batches: Iterable[Arrays], recorders: Sequence[MomentRecorder]) -> None:
    """Passes every packed batch to each recorder: an even number of batches of one size, all rows used."""

    def visit(module: LoraModule, x: Tensor, dy: Tensor) -> None:
        for recorder in recorders:
            recorder.visit(module, x, dy)

    for batch in batches:
        for recorder in recorders:
            recorder.begin(len(batch[0]))
        gradients.run(batch, visit)


def pair_moments(grams: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Returns unbiased (tr F, tr F^2, g^T F g) from batches' inner products (E, E) of independent gradients, E >= 3."""
    total = square = along = count = pairs = triples = 0.0
    for gram in grams:
        size = len(gram)
        off = gram - np.diag(np.diag(gram))
        total += float(np.trace(gram))
        square += float((off**2).sum())
        along += float((off.sum(1) ** 2).sum() - (off**2).sum())
        count += size
        pairs += size * (size - 1)
        triples += size * (size - 1) * (size - 2)
    return total / count, square / pairs, along / triples
