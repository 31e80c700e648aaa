"""A zeroth-order step as an ExecuTorch program that runs fewer than all 2q paths in a pass.

It has the decoder, delegates, noise and weights file of a MobiZO program. `sequential` is MeZO on LoRA-FA (Malladi et
al., 2023; the paper's Algorithm 3): a step with q queries is 2q calls of `losses` and one of `replay`. `inner` and
`outer` are the paper's ablations of appendix H.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from bench.baselines.steps import Grouping, passes
from bench.programs import Methods
from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.export.backends.xnnpack import lower_layers
from server.compiler.export.emission import Signature, emit
from server.compiler.export.network import BaseNetwork, QuantizedBase
from server.compiler.export.weights import StoredKeys
from server.compiler.methods.noise import directions
from server.compiler.methods.training import Adapter, Load, Network, Replay
from shared.program_inputs import MIN_LENGTH
from shared.recipe import Recipe

METHODS = ("adapter", "load", "replay", "losses")


class PassLosses(Network):
    """The losses of one pass's paths."""

    pairs: bool  # the + and - of a direction are in one pass

    def forward(self, tokens: Tensor, positions: Tensor, *labels_and_directions: Tensor) -> Tensor:
        """tokens (E, S), positions (E, T), then, as in `step`: labels, mask, seeds int32 (m, 2), scale (1,).

        Returns losses (n,): at B + scale z of each direction, then, with pairs, at B - scale z.
        """
        *labels, mask, seeds, scale = labels_and_directions
        b = self.state.current().unsqueeze(0)
        offset = directions(self.recipe.noise, seeds, b.shape[1]) * scale
        paths = torch.cat((b + offset, b - offset)) if self.pairs else b + offset
        n = paths.shape[0]
        hidden = self.run(self.stacks[0], self.backbone.embed(tokens).repeat(n, 1, 1), paths)
        answers = self.backbone.gather_positions(hidden, positions.repeat(n, 1))  # (n*E, T, hidden)
        if self.recipe.loss == "full":
            (truth,) = labels
            nll = -self.log_probabilities(answers, truth.repeat(n, 1).unsqueeze(2)).reshape(n, -1)
        else:
            nll = self._candidates(answers, *labels)
        return (nll * mask.reshape(1, -1)).sum(dim=1) / mask.sum()

    def _candidates(self, answers: Tensor, choices: Tensor, choice_mask: Tensor) -> Tensor:
        """answers (n*E, T, hidden), choices (E, T, C). Returns negative log-likelihoods (n, E*T)."""
        examples, answer, count = choices.shape
        n = answers.shape[0] // examples
        rows = self.backbone.head_rows(choices).reshape(examples * answer, count, -1)
        by_path = answers.reshape(n, examples * answer, -1).permute(1, 2, 0)  # (E*T, hidden, n)
        logits = torch.bmm(rows, by_path).permute(2, 0, 1)  # (n, E*T, C)
        logits = logits - ((1.0 - choice_mask) * 1e9).reshape(1, examples * answer, count)
        return -torch.log_softmax(logits, dim=-1)[:, :, 0]


def emit_passes(recipe: Recipe, source: str, path: Path, grouping: Grouping) -> None:
    """Writes the program to `path`. Its weights file is that of any program of the same base and precision."""
    base = QuantizedBase.of(load_checkpoint(source), recipe.precision)
    stored = StoredKeys(base.stored)
    network = BaseNetwork(recipe, base, partial(lower_layers, stored=stored))
    paths = len(passes(grouping, recipe.queries)[0])
    stack = network.stack(recipe.effective_batch * paths, paths, slice(None))
    e, s, t, c = recipe.effective_batch, recipe.sequence_length, recipe.answer_length, recipe.choices
    module = PassLosses(recipe, network.size, network.backbone, None, stack)
    module.pairs = grouping in ("inner", "both")
    token_inputs = (torch.zeros((e, s), dtype=torch.int64), torch.zeros((e, t), dtype=torch.int64))
    answers = (torch.zeros((e, t), dtype=torch.int64),)
    choices = (torch.zeros((e, t, c), dtype=torch.int64), torch.ones(e, t, c))
    labels = (*(answers if recipe.loss == "full" else choices), torch.ones(e, t))
    seeds = torch.zeros((recipe.queries, 2), dtype=torch.int32)
    directions_per_pass = paths // 2 if module.pairs else paths  # directions of one pass
    modules = (
        Signature(Adapter(recipe, network.size), ()),
        Signature(Load(recipe, network.size), (torch.zeros(network.size),)),
        Signature(Replay(recipe, network.size), (seeds, torch.zeros(recipe.queries))),
        Signature(
            module,
            (*token_inputs, *labels, seeds[:directions_per_pass].clone(), torch.ones(1)),
            {0: {1: Dim("S", min=MIN_LENGTH, max=s)}},
        ),
    )
    emit(dict(zip(METHODS, modules, strict=True)), stored, path)


class Passes:
    """Runs a program that `emit_passes` wrote for the recipe."""

    def __init__(self, recipe: Recipe, size: int, program: Path, weights: Path, grouping: Grouping) -> None:
        """size: D."""
        self.recipe, self._size, self._pairs = recipe, size, grouping in ("inner", "both")
        self._passes = passes(grouping, recipe.queries)
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
        losses = np.zeros(2 * queries, np.float32)
        for group in self._passes:
            plus_paths = group[: len(group) // 2] if self._pairs else group  # pairs: the + paths name the directions
            scale = eps if group[0] < queries else -eps
            rows = seeds[[path % queries for path in plus_paths]]
            losses[group] = self._methods("losses", *batch, rows, np.array([scale], np.float32))[0]
        plus, minus = losses.reshape(2, -1)
        coefficients = (lr / queries * (plus - minus) / (2 * eps)).astype(np.float32)
        self._methods("replay", seeds, coefficients)
        return losses, coefficients
