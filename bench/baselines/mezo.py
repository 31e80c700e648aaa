"""MeZO on LoRA-FA (Malladi et al., 2023; the paper's Algorithm 3) as an ExecuTorch program: one path at a time.

Of the same family as a MobiZO program: the same decoder, delegates, noise and weights file, with n = 1. A step with q
queries is 2q calls of `loss` and one of `replay`.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from bench.runtime import Methods
from server.compiler.backends.xnnpack import lower_layers
from server.compiler.checkpoint import load_checkpoint
from server.compiler.emission import Signature, emit
from server.compiler.methods import Adapter, Load, Network, Replay
from server.compiler.network import BaseNetwork, QuantizedBase
from server.compiler.noise import directions
from shared.program import MIN_LENGTH
from shared.recipe import Recipe


class PathLoss(Network):
    """The loss at B + scale z, for one direction z."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        choices: Tensor,
        choice_mask: Tensor,
        mask: Tensor,
        seeds: Tensor,
        scale: Tensor,
    ) -> Tensor:
        """tokens (E, S), positions (E, T), choices (E, T, C), choice_mask, mask, seeds int32 (1, 2): loss (1,)."""
        b = self.state.current() + directions(self.recipe.noise, seeds, self.state.flat_b.shape[0])[0] * scale
        hidden = self.run(self.stacks[0], self.trunk.embed(tokens), b.unsqueeze(0))
        answers = self.trunk.pick(hidden, positions)  # (E, T, hidden)
        examples, answer, count = choices.shape
        rows = self.trunk.head_rows(choices).reshape(examples * answer, count, -1)
        logits = torch.bmm(rows, answers.reshape(examples * answer, -1, 1)).reshape(examples, answer, count)
        nll = -torch.log_softmax(logits - (1.0 - choice_mask) * 1e9, dim=-1)[:, :, 0]
        return ((nll * mask).sum() / mask.sum()).reshape(1)


class SequentialMezo:
    """MeZO with q queries, sequential."""

    def __init__(self, recipe: Recipe, source: str, weights: Path, directory: Path) -> None:
        """weights: the `.ptd` of a program of the same base and precision."""
        from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

        stored = set(FlatTensorSerializer().deserialize(weights.read_bytes()).named_data)
        base = QuantizedBase.of(load_checkpoint(source), recipe.precision)
        network = BaseNetwork(recipe, base, partial(lower_layers, stored=stored))
        stack = network.stack(recipe.effective_batch, 1, slice(None))
        e, s, t, c = recipe.effective_batch, recipe.sequence_length, recipe.answer_length, recipe.choices
        module = PathLoss(recipe, network.size, network.trunk, None, stack)
        whole = (torch.zeros((e, s), dtype=torch.int64), torch.zeros((e, t), dtype=torch.int64))
        labels = (torch.zeros((e, t, c), dtype=torch.int64), torch.ones(e, t, c), torch.ones(e, t))
        path = directory / "sequential.pte"
        seeds = torch.zeros((recipe.queries, 2), dtype=torch.int32)
        methods = {
            "adapter": Signature(Adapter(recipe, network.size), ()),
            "load": Signature(Load(recipe, network.size), (torch.zeros(network.size),)),
            "replay": Signature(Replay(recipe, network.size), (seeds, torch.zeros(recipe.queries))),
            "loss": Signature(
                module,
                (*whole, *labels, seeds[:1].clone(), torch.ones(1)),
                {0: {1: Dim("S", min=MIN_LENGTH, max=s)}},
            ),
        }
        emit(methods, stored, path)
        self.recipe, self._size = recipe, network.size
        self._methods = Methods(path, weights, methods)

    def reset(self) -> None:
        """B = 0."""
        self._methods("load", np.zeros(self._size, np.float32))

    def step(
        self, batch: tuple[np.ndarray, ...], seeds: np.ndarray, lr: float, eps: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """As a program's `step`: losses (2q,), coefficients (q,)."""
        losses = [
            self._methods("loss", *batch, seeds[query : query + 1], np.array([sign * eps], np.float32))[0][0]
            for sign in (1, -1)
            for query in range(self.recipe.queries)
        ]
        found = np.array(losses, np.float32)
        plus, minus = found.reshape(2, -1)
        coefficients = (lr / self.recipe.queries * (plus - minus) / (2 * eps)).astype(np.float32)
        self._methods("replay", seeds, coefficients)
        return found, coefficients
