"""MeZO on LoRA-FA (Malladi et al., 2023; the paper's Algorithm 3) as an ExecuTorch program that runs one path a call.

It has the decoder, delegates, noise and weights file of a MobiZO program. A step with q queries is 2q calls of `losses`
and one of `replay`.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from bench.programs import Methods
from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.export.backends.xnnpack import lower_layers
from server.compiler.export.emission import Signature, emit
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.network import BaseNetwork, QuantizedBase
from server.compiler.export.weights import StoredKeys
from server.compiler.methods.noise import directions
from server.compiler.methods.training import Adapter, Load, Network, Replay
from shared.program_inputs import MIN_LENGTH
from shared.recipe import Recipe

METHODS = ("adapter", "load", "replay", "losses")


class PathLoss(Network):
    """The loss of one path."""

    def forward(self, tokens: Tensor, positions: Tensor, *labels_and_direction: Tensor) -> Tensor:
        """tokens (E, S), positions (E, T), then, as in `step`: labels, mask, seed int32 (1, 2), scale (1,).

        Returns the loss at B + scale z, (1,).
        """
        *labels, mask, seed, scale = labels_and_direction
        b = self.state.current().unsqueeze(0)
        path = b + directions(self.recipe.noise, seed, b.shape[1]) * scale
        hidden = self.run(self.stacks[0], self.backbone.embed(tokens), path)
        answers = self.backbone.gather_positions(hidden, positions)  # (E, T, hidden)
        if self.recipe.loss == "full":
            (truth,) = labels
            nll = -self.log_probabilities(answers, truth.unsqueeze(2)).reshape(1, -1)
        else:
            nll = self._candidates(answers, *labels)
        return (nll * mask.reshape(1, -1)).sum(dim=1) / mask.sum()

    def _candidates(self, answers: Tensor, choices: Tensor, choice_mask: Tensor) -> Tensor:
        """answers (E, T, hidden), choices (E, T, C). Returns negative log-likelihoods (1, E*T)."""
        examples, answer, count = choices.shape
        rows = self.backbone.head_rows(choices).reshape(examples * answer, count, -1)
        logits = torch.bmm(rows, answers.reshape(examples * answer, -1, 1)).squeeze(2)  # (E*T, C)
        logits = logits - ((1.0 - choice_mask) * 1e9).reshape(examples * answer, count)
        return -torch.log_softmax(logits, dim=-1)[:, 0].unsqueeze(0)


def emit_sequential(recipe: Recipe, source: str, path: Path) -> None:
    """Writes the program to `path`. Its weights file is that of any program of the same base and precision."""
    base = QuantizedBase.of(load_checkpoint(source), recipe.precision)
    stored = StoredKeys(base.stored)
    network = BaseNetwork(recipe, base, partial(lower_layers, stored=stored, kept=LoweredFiles()))
    stack = network.stack(recipe.effective_batch, 1, slice(None))
    e, s, t, c = recipe.effective_batch, recipe.sequence_length, recipe.answer_length, recipe.choices
    module = PathLoss(recipe, network.size, network.backbone, None, stack)
    token_inputs = (torch.zeros((e, s), dtype=torch.int64), torch.zeros((e, t), dtype=torch.int64))
    answers = (torch.zeros((e, t), dtype=torch.int64),)
    choices = (torch.zeros((e, t, c), dtype=torch.int64), torch.ones(e, t, c))
    labels = (*(answers if recipe.loss == "full" else choices), torch.ones(e, t))
    seeds = torch.zeros((recipe.queries, 2), dtype=torch.int32)
    modules = (
        Signature(Adapter(recipe, network.size), ()),
        Signature(Load(recipe, network.size), (torch.zeros(network.size),)),
        Signature(Replay(recipe, network.size), (seeds, torch.zeros(recipe.queries))),
        Signature(
            module,
            (*token_inputs, *labels, seeds[:1].clone(), torch.ones(1)),
            {0: {1: Dim("S", min=MIN_LENGTH, max=s)}},
        ),
    )
    emit(dict(zip(METHODS, modules, strict=True)), stored, path)


class SequentialMezo:
    """Runs a program that `emit_sequential` wrote for the recipe."""

    def __init__(self, recipe: Recipe, size: int, program: Path, weights: Path) -> None:
        """size: D."""
        self.recipe, self._size = recipe, size
        self._methods = Methods(program, weights, METHODS)

    def reset(self) -> None:
        """Sets B = 0."""
        self._methods("load", np.zeros(self._size, np.float32))

    def adapter(self) -> np.ndarray:
        """Returns a copy of B, (D,)."""
        return self._methods("adapter")[0].copy()

    def step(
        self, batch: tuple[np.ndarray, ...], seeds: np.ndarray, lr: float, eps: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns, like a program's `step`, losses (2q,) and coefficients (q,)."""
        queries = self.recipe.queries
        scales = (np.array([scale], np.float32) for scale in (eps, -eps))
        losses = [self._methods("losses", *batch, seeds[[q]], scale)[0][0] for scale in scales for q in range(queries)]
        plus, minus = np.array(losses, np.float32).reshape(2, -1)
        coefficients = (lr / queries * (plus - minus) / (2 * eps)).astype(np.float32)
        self._methods("replay", seeds, coefficients)
        return np.concatenate((plus, minus)), coefficients
