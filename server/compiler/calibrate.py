"""Computes a calibration (`shared.zo.calibration`) from gradients or activations of a base model.

For each linear layer it accumulates a Gram matrix (in, in) and stores the leading eigenvectors. Kind gradients: the sum
over batches of G^T G, where G (out, in) is the gradient of a batch's mean loss with respect to the weight; the
eigenvectors are the right singular vectors of the stacked gradients. Kind activations: the sum over tokens of x x^T.
All batches pass one decoder layer before the next layer is read (`server.compiler.layerwise`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.layerwise import LayerwisePasses
from server.compiler.model.backbone import Backbone
from shared.errors import InvalidDataset
from shared.recipe import Recipe, Target
from shared.zo.calibration import F32, CalibrationMetadata, Kind, dump_calibration
from shared.zo.encoding import Example
from shared.zo.lora import lora_modules
from shared.zo.packing import pack_step

Progress = Callable[[str, float], None]

_EXCLUDED = -1e9  # logit of a padded choice
_NOTHING = 1e-12  # eigenvalues below this share of the largest are rounding errors of squared float32 gradients


def calibrate(
    source: str,
    recipe: Recipe,
    kind: Kind,
    task: str,
    examples: Sequence[Example],
    progress: Progress | None = None,
    directory: Path | None = None,
    *,
    balance: bool = False,
) -> bytes:
    """Returns the calibration file of the base at `source`, computed from `examples` in order, E at a time.

    recipe: selects targets and layers, with `rank` directions each (at most the number of inputs of the layer), and
    gives the loss, E and S of the gradients and the base named in the file. task: name recorded in the file.
    progress: called with the name of a stage and the fraction done, 0 to 1. directory: where temporary files of hidden
    states are made, 4 hidden bytes for each token of the examples, for kind gradients once for each layer from the
    lowest selected one on; None: the system's own. balance: of kind gradients, scale each module's A so that gradients
    of B at B = 0 have the same root mean square norm over batches in all modules, that of all before.
    Memory: one layer or one table in float32, and 8 in^2 bytes for each selected module of one layer. Raises
    UnknownBase, UnreadableCheckpoint, UnsupportedModel, InvalidRecipe, or InvalidDataset if the examples span too few
    directions.
    """
    report = progress or (lambda stage, fraction: None)
    report("read", 0.0)
    checkpoint = load_checkpoint(source)
    facts = checkpoint.facts
    modules = lora_modules(recipe, facts)
    names = {(module.layer, module.target): module.name for module in modules}
    selected = sorted({module.layer for module in modules})
    batches = [
        _Batch(examples[at : at + recipe.effective_batch], recipe)
        for at in range(0, len(examples), recipe.effective_batch)
    ]
    directions: dict[str, F32] = {}
    energies: dict[str, float] = {}

    def take(layer: int, grams: _Grams) -> None:
        for target, gram in grams.sums.items():
            name = names[layer, target]
            directions[name], energies[name] = _leading(gram, min(recipe.rank, len(gram)), name)

    with TemporaryDirectory(prefix=".states-", dir=directory) as states:
        passes = LayerwisePasses(checkpoint, [batch.tokens for batch in batches], Path(states))
        backward = kind == "gradients"
        last = facts.layers if backward else selected[-1] + 1
        count = last + (facts.layers - selected[0] if backward else 0)
        for layer in range(last):
            report("examples", layer / count)
            grams = _Grams(recipe, batches)
            observes = not backward and layer in selected
            passes.forward(layer, grams.add_inputs if observes else None, keep=backward and layer >= selected[0])
            take(layer, grams)
        if backward:
            passes.losses(lambda number, backbone, hidden: _loss(recipe, batches[number], backbone, hidden))
        for layer in reversed(range(selected[0], facts.layers) if backward else ()):
            report("examples", (last + facts.layers - 1 - layer) / count)
            grams = _Grams(recipe, batches)
            passes.backward(layer, grams.add_gradients if layer in selected else _nothing)
            take(layer, grams)
    report("directions", 1.0)
    mean = sum(energies.values()) / len(energies)
    scales = {name: (mean / energy) ** 0.5 for name, energy in energies.items()} if balance and backward else None
    return dump_calibration(
        CalibrationMetadata(base=recipe.base, kind=kind, task=task, examples=len(examples), scales=scales), directions
    )


def _nothing(number: int, target: Target, x: Tensor, y: Tensor) -> None:
    """Observes nothing."""


class _Batch:
    """The inputs of at most E examples."""

    def __init__(self, examples: Sequence[Example], recipe: Recipe) -> None:
        arrays = pack_step(examples, recipe, dynamic=True)
        self.tokens, self.positions, *self.labels, self.mask = (torch.from_numpy(array) for array in arrays)
        lengths = torch.zeros(len(self.tokens), 1)
        lengths[: len(examples), 0] = torch.tensor([len(example.correct_row.tokens) for example in examples])
        self.real = (torch.arange(self.tokens.shape[1]) < lengths).reshape(-1)  # (E S,): not padding


class _Grams:
    """The Gram matrices of one layer's selected linear layers, float64 (in, in) each."""

    def __init__(self, recipe: Recipe, batches: Sequence[_Batch]) -> None:
        self._targets, self._batches = recipe.targets, batches
        self.sums: dict[Target, Tensor] = {}

    def add_inputs(self, number: int, target: Target, x: Tensor, y: Tensor) -> None:
        """Adds the inputs x (E, S, in) of a batch."""
        if target in self._targets:
            rows = x.flatten(0, -2)[self._batches[number].real].double()  # (tokens, in)
            self._sum(target, rows.shape[1]).addmm_(rows.T, rows)

    def add_gradients(self, number: int, target: Target, x: Tensor, y: Tensor) -> None:
        """Adds the gradient by the weight once the gradient by the output y is known."""
        if target not in self._targets:
            return
        inputs = x.detach().flatten(0, -2)  # (tokens, in)

        def backward(delta: Tensor) -> None:
            gradient = (delta.flatten(0, -2).T @ inputs).double()  # (out, in)
            self._sum(target, gradient.shape[1]).addmm_(gradient.T, gradient)

        y.register_hook(backward)

    def _sum(self, target: Target, size: int) -> Tensor:
        if target not in self.sums:
            self.sums[target] = torch.zeros(size, size, dtype=torch.float64)
        return self.sums[target]


def _loss(recipe: Recipe, batch: _Batch, backbone: Backbone, hidden: Tensor) -> Tensor:
    """Returns the mean negative log-likelihood of the answer tokens, as a program's step computes it with B = 0.

    hidden: states (E, S, hidden) after the last layer.
    """
    answers = backbone.gather_positions(hidden, batch.positions)  # (E, T, hidden)
    if recipe.loss == "full":
        logits, truth = backbone.cap(backbone.logits(answers)), batch.labels[0].long()
    else:
        choices, choice_mask = batch.labels
        logits = backbone.cap((backbone.head_rows(choices) @ answers.unsqueeze(3)).squeeze(3))  # (E, T, C)
        logits = logits.masked_fill(choice_mask == 0, _EXCLUDED)
        truth = torch.zeros_like(choices[:, :, 0], dtype=torch.int64)
    nll = -torch.log_softmax(logits, -1).gather(2, truth.unsqueeze(2)).squeeze(2)
    return (nll * batch.mask).sum() / batch.mask.sum()


def _leading(gram: Tensor, width: int, name: str) -> tuple[F32, float]:
    """Returns the leading eigenvectors of a Gram matrix (in, in), float32 (in, width), strongest first.

    Also the sum of their eigenvalues.
    """
    values, vectors = torch.linalg.eigh(gram)
    if not values[-1].isfinite() or values[-width] <= _NOTHING * values[-1]:
        raise InvalidDataset(
            f"the examples span fewer than {width} directions of {name}; use more examples or a smaller width"
        )
    top = vectors[:, -width:].flip(1).numpy()
    signs = np.sign(top[np.abs(top).argmax(0), np.arange(width)])  # an eigenvector's own sign is arbitrary
    leading: F32 = (top * signs).astype(np.float32)
    return leading, float(values[-width:].sum())
