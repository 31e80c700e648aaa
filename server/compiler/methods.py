"""The methods of a program as modules to export: one MobiZO step (paper, Algorithm 1), replay, score, B in and out.

All five hold the same flat B; `step` and `score` run the same trunk at the same shapes, so it is lowered once.
Knows shapes and arithmetic; knows nothing of files, delegates or checkpoints' forms.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from server.compiler.base import BaseFacts
from server.compiler.decoder import LayerTables, RmsNorm, layer_shape
from server.compiler.noise import directions
from shared.recipe import Recipe

FLAT_B = "flat_b"  # the name of the buffer that all methods share
EXCLUDED = -1e9  # replaces the logit of a padded choice


class Trunk(nn.Module):
    """Everything that is frozen: embedding table, decoder layers, final norm, lm_head."""

    def __init__(
        self,
        recipe: Recipe,
        facts: BaseFacts,
        layers: Sequence[nn.Module],
        embedding: Tensor,
        norms: Tensor,
        lm_head: Tensor | None,
    ) -> None:
        """layers: called as `DecoderLayer` is. norms: (2 layers + 1, hidden). lm_head: None when tied to embedding."""
        super().__init__()
        self.shape = layer_shape(recipe, facts)
        self.layers = nn.ModuleList(layers)
        self.register_buffer("embedding", embedding)  # (V, hidden)
        self.register_buffer("norms", norms)
        if lm_head is not None:
            self.register_buffer("lm_head", lm_head)  # (V, hidden)
        self.tables = LayerTables(self.shape)
        self.final_norm = RmsNorm(facts)
        self.tied = lm_head is None

    @property
    def head(self) -> Tensor:
        """lm_head's rows, (V, hidden); the embedding table when tied, so that it is stored once."""
        return self.embedding if self.tied else self.lm_head

    def answers(self, hidden: Tensor, positions: Tensor, b: Tensor) -> Tensor:
        """Normed hidden states at the positions alone, before lm_head: (R, T, hidden).

        hidden: embedded tokens (R, S, hidden); positions: (R, T); b: every path's B (n, D).
        """
        size = self.shape.slab
        tables = self.tables()
        for index, layer in enumerate(self.layers):
            slab = b[:, index * size : (index + 1) * size]
            hidden = layer(hidden, slab, self.norms[2 * index], self.norms[2 * index + 1], *tables)
        rows = torch.arange(self.shape.rows, dtype=positions.dtype).reshape(-1, 1) * self.shape.sequence
        picked = functional.embedding(positions + rows, hidden.reshape(-1, hidden.shape[-1]))
        return self.final_norm(picked, self.norms[2 * len(self.layers)])

    def log_probabilities(self, answers: Tensor, choices: Tensor) -> Tensor:
        """Log-softmax over the whole vocabulary at `answers` (R, T, hidden), of `choices` (R, T, C): (R, T, C)."""
        logits = functional.linear(answers, self.head)
        return torch.gather(torch.log_softmax(logits, dim=-1), 2, choices.to(torch.int64))

    def choice_logits(self, answers: Tensor, choices: Tensor) -> Tensor:
        """Logits of `choices` (E, T, C) alone, by their rows of lm_head: (R, T, C) for `answers` (R, T, hidden)."""
        examples, tokens, count = choices.shape
        rows = functional.embedding(choices, self.head)  # (E, T, C, hidden)
        rows = rows.reshape(examples * tokens, count, -1)
        by_path = answers.reshape(self.shape.paths, examples * tokens, -1).permute(1, 2, 0)  # (E*T, hidden, n)
        logits = torch.bmm(rows, by_path)  # (E*T, C, n)
        return logits.permute(2, 0, 1).reshape(self.shape.rows, tokens, count)


class Method(nn.Module):
    """A method of one program: flat B, and the recipe it was made from."""

    def __init__(self, recipe: Recipe, size: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.register_buffer(FLAT_B, torch.zeros(size))  # (D,)

    def descend(self, z: Tensor, coefficients: Tensor) -> Tensor:
        """B -= c_i z_i for i in order; z (q, D), coefficients (q,). Exact replay needs this order. Returns B."""
        b = self.flat_b
        for query in range(self.recipe.queries):
            b = b - z[query] * coefficients[query]
        return self.flat_b.copy_(b)


class Step(Method):
    """One MobiZO step: perturb, forward all 2q paths, estimate, update B before returning."""

    def __init__(self, recipe: Recipe, size: int, trunk: Trunk) -> None:
        super().__init__(recipe, size)
        self.trunk = trunk

    def nll(self, tokens: Tensor, positions: Tensor, labels: Sequence[Tensor], b: Tensor) -> Tensor:
        """Negative log-likelihoods (R, T) of the answer tokens. labels: (answers,) or (choices, choice_mask)."""
        paths = self.recipe.paths
        hidden = functional.embedding(tokens, self.trunk.embedding).repeat(paths, 1, 1)  # (R, S, hidden)
        answers = self.trunk.answers(hidden, positions.repeat(paths, 1), b)
        if self.recipe.loss == "full":
            (truth,) = labels
            return -self.trunk.log_probabilities(answers, truth.repeat(paths, 1).unsqueeze(2)).squeeze(2)
        choices, choice_mask = labels
        logits = self.trunk.choice_logits(answers, choices)
        logits = logits + ((1.0 - choice_mask) * EXCLUDED).repeat(paths, 1, 1)
        return -torch.log_softmax(logits, dim=-1)[:, :, 0]

    def forward(self, tokens: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs as in `shared.program`. Returns losses (2q,) at B +- eps z, and coefficients (q,)."""
        *labels, mask, seeds, lr, eps = rest
        queries = self.recipe.queries
        z = directions(self.recipe.noise, seeds, self.flat_b.shape[0])  # (q, D)
        offset = z * eps
        b = self.flat_b.unsqueeze(0)
        nll = self.nll(tokens, positions, labels, torch.cat((b + offset, b - offset)))
        per_path = nll.reshape(self.recipe.paths, -1)  # (2q, E*T)
        weight = mask.reshape(1, -1)
        losses = (per_path * weight).sum(dim=1) / torch.clamp(weight.sum(dim=1), min=1.0)
        slopes = (losses[:queries] - losses[queries:]) / (eps * 2.0)  # projected gradients g_i
        coefficients = slopes * (lr / queries)
        self.descend(z, coefficients)
        return losses, coefficients


class Replay(Method):
    """The update of `step` alone, from its recorded coefficients."""

    def forward(self, seeds: Tensor, coefficients: Tensor) -> Tensor:
        """seeds int32 (q, 2), coefficients (q,). Returns B's first element (1,)."""
        b = self.descend(directions(self.recipe.noise, seeds, self.flat_b.shape[0]), coefficients)
        return b[:1] + 0.0


class Score(Method):
    """Log-probabilities under the current, unperturbed B."""

    def __init__(self, recipe: Recipe, size: int, trunk: Trunk) -> None:
        super().__init__(recipe, size)
        self.trunk = trunk

    def forward(self, tokens: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
        """tokens (R, S), positions (R, T), choices (R, T, C). Returns (R, T, C)."""
        hidden = functional.embedding(tokens, self.trunk.embedding)
        b = self.flat_b.unsqueeze(0).repeat(self.recipe.paths, 1)
        return self.trunk.log_probabilities(self.trunk.answers(hidden, positions, b), choices)


class Adapter(Method):
    """B, read."""

    def forward(self) -> Tensor:
        """Returns B (D,)."""
        return self.flat_b + 0.0


class Load(Method):
    """B, written."""

    def forward(self, b: Tensor) -> Tensor:
        """b: float32 (D,). Returns its first element (1,)."""
        self.flat_b.copy_(b)
        return b[:1] + 0.0
