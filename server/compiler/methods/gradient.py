"""Steps with the exact gradient (estimators `gradient` and `directional`): forward, the loss's gradient, and the layers
in reverse.

The forward pass keeps each adapted layer's input; every reverse pass computes its layer again from it. A recipe's
micro-batches are computed one after the other, and their gradients are added up. Knows shapes and arithmetic; knows
nothing of files, delegates or checkpoints' forms.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from server.compiler.methods.optimizers import Rates
from server.compiler.methods.training import EXCLUDED, Method, Network, Stack, micro_batches
from server.compiler.model.backbone import Trunk
from server.compiler.model.quantization import SCALE
from server.compiler.model.reverse import norm_output, norm_reverse, normed
from shared.recipe import Recipe

PIECE = 4096  # rows of a quantized table that are in float32 at once


class GradientSuffix(Network):
    """One step of the exact gradient from the prefix's hidden states."""

    def __init__(
        self,
        recipe: Recipe,
        size: int,
        trunk: Trunk,
        head: nn.Module | None,
        reverses: Sequence[nn.Module],
        scales: Tensor | None,
        *stacks: Stack,
    ) -> None:
        """reverses: of the last stack's layers. scales: of their linear weights, (layers, outputs); None: float32."""
        super().__init__(recipe, size, trunk, head, *stacks)
        self.reverses = list(reverses)  # no submodules: a layer that is not lowered is already one
        self.register_buffer("scales", scales, persistent=False)
        # One longer than the bound: an exporter takes a slice of the whole for no slice.
        self.register_buffer("at", torch.arange(recipe.sequence_length + 1), persistent=False)

    def forward(self, inputs: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs as in `shared.program`. Returns the loss [1] at the B of before, and what the update gives.

        That is the gradient's norm [1] with estimator `gradient`, and the coefficients (q,) with `directional`.
        """
        *labels, mask = rest[:-3]
        loss, gradient = self.differentiate(inputs, positions, labels, mask)
        if self.recipe.estimator == "directional":
            seeds, lr, _ = rest[-3:]
            return loss, self.state.project(gradient, seeds, lr)
        return loss, self.state.update(gradient, Rates(*rest[-3:]))

    def enter(self, inputs: Tensor) -> Tensor:
        """The hidden states (rows, S, hidden) before the last stack, from a method's first input."""
        return inputs

    def differentiate(
        self, inputs: Tensor, positions: Tensor, labels: Sequence[Tensor], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The mean loss [1] over the answer tokens, and its gradient (D,) in B.

        inputs: the method's first one, (E, ...). labels: (answers,) or (choices, choice_mask).
        """
        first, *others = micro_batches(self.recipe, inputs, positions, *labels, mask)
        nll, gradient = self.sums(*first)
        for other in others:  # each is added before the next one is computed, so that one gradient is kept
            more = self.sums(*other)
            nll, gradient = nll + more[0], gradient + more[1]
        count = torch.clamp(mask.reshape(-1).sum(dim=0, keepdim=True), min=1.0)
        return nll / count, gradient / count

    def sums(self, inputs: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """The loss [1] summed over the answer tokens of one micro-batch, and its gradient (D,) in B.

        rest: labels, then the mask.
        """
        *labels, mask = rest
        hidden = self.enter(inputs)
        stack = self.stacks[-1]
        b = self.state.current().unsqueeze(0)  # (1, D)
        kept: list[Tensor] = []
        others = list(self.trunk.others(stack.shapes, stack.first, hidden.shape[1], b))
        for layer, other in zip(stack.layers, others, strict=True):
            kept.append(hidden)
            hidden = layer(hidden, *other)
        nll, gradient = self.answers_gradient(hidden, positions, labels, mask)
        parts: list[Tensor] = []
        for place in reversed(range(len(kept))):
            scales = () if self.scales is None else (self.scales[place],)
            gradient = self.reverses[place](kept[place], gradient, *others[place], *scales)
            if stack.shapes[place].targets:
                gradient, by_example = gradient
                parts.append(by_example.sum(dim=0))  # (slab,)
        total = torch.cat(parts[::-1]) if len(parts) > 1 else parts[0]
        return (nll * mask).reshape(-1).sum(dim=0, keepdim=True), total

    def answers_gradient(
        self, hidden: Tensor, positions: Tensor, labels: Sequence[Tensor], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Negative log-likelihoods (E, T), and the gradient (E, S, hidden) of their sum over `mask` (E, T).

        Not of their mean: the last bits of a small gradient would be lost where activations are quantized.
        """
        facts, trunk = self.trunk.facts, self.trunk
        places = positions.unsqueeze(2).expand(-1, -1, hidden.shape[2])
        picked = normed(trunk.final_norm, torch.gather(hidden, 1, places))  # (E, T, hidden)
        vectors = trunk.final_vectors()
        answers = norm_output(picked, *vectors)
        if self.recipe.loss == "full":
            nll, gradient = self.vocabulary_gradient(answers, labels[0])
        else:
            nll, gradient = self.candidates_gradient(answers, *labels)
        gradient = norm_reverse(trunk.final_norm, gradient * mask.unsqueeze(2), vectors[0], picked)
        # By a product with ones and zeros: positions of padding may coincide with others.
        at = self.at[: hidden.shape[1]].reshape(1, -1, 1) == positions.unsqueeze(1)  # (E, S, T)
        return nll, torch.bmm(at.to(torch.float32), gradient).view(-1, hidden.shape[1], facts.hidden)

    def vocabulary_gradient(self, answers: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
        """The loss over the whole vocabulary: nll (E, T) and its gradient (E, T, hidden). truth: (E, T).

        A softmax p's negative log-likelihood has the gradient p - 1 at the truth, p elsewhere.
        """
        logits = self.trunk.cap(self.trunk.logits(answers) if self.head is None else self.head(answers))
        log_p = torch.log_softmax(logits, dim=-1)
        at, slope = truth.to(torch.int64).unsqueeze(2), self.cap_slope(logits)
        weights = torch.exp(log_p)
        row = self.trunk.head_rows(truth)
        if slope is not None:
            weights, row = weights * slope, row * torch.gather(slope, 2, at)
        return -torch.gather(log_p, 2, at).squeeze(2), self.table_product(weights) - row

    def candidates_gradient(self, answers: Tensor, choices: Tensor, choice_mask: Tensor) -> tuple[Tensor, Tensor]:
        """The loss over the candidates (E, T, C), the first is the truth: nll (E, T), its gradient (E, T, hidden)."""
        examples, tokens, count = choices.shape
        rows = self.trunk.head_rows(choices).reshape(examples * tokens, count, -1)
        logits = torch.bmm(rows, answers.reshape(examples * tokens, -1, 1)).reshape(examples, tokens, count)
        logits = self.trunk.cap(logits)
        log_p = torch.log_softmax(logits + (1.0 - choice_mask) * EXCLUDED, dim=-1)
        weights = torch.exp(log_p)
        weights = torch.cat((weights[:, :, :1] - 1.0, weights[:, :, 1:]), dim=2) if count > 1 else weights - 1.0
        slope = self.cap_slope(logits)
        weights = (weights if slope is None else weights * slope).reshape(examples * tokens, 1, count)
        return -log_p[:, :, 0], torch.bmm(weights, rows).reshape(answers.shape)

    def cap_slope(self, logits: Tensor) -> Tensor | None:
        """The soft cap's slope at capped logits, 1 - tanh^2; None: the base has no cap."""
        cap = self.trunk.facts.final_softcap
        if cap is None:
            return None
        bent = logits * (1 / cap)
        return 1.0 - bent * bent

    def table_product(self, weights: Tensor) -> Tensor:
        """weights (E, T, V) times lm_head's table (V, hidden): (E, T, hidden).

        A quantized table is multiplied in float32, by pieces: probabilities under 1/255 would round to nothing.
        """
        name = "embedding" if self.trunk.tied else "lm_head"
        table, scales = getattr(self.trunk, name), getattr(self.trunk, name + SCALE, None)
        flat = weights.reshape(-1, table.shape[0])
        if scales is None:
            return torch.mm(flat, table).reshape(*weights.shape[:2], -1)
        flat = (flat.unsqueeze(2) * scales).squeeze(2)  # no view of a constant that another file holds
        pieces = [
            torch.mm(flat[:, start : start + PIECE], table[start : start + PIECE].to(torch.float32))
            for start in range(0, table.shape[0], PIECE)
        ]
        total = pieces[0]
        for piece in pieces[1:]:
            total = total + piece
        return total.reshape(*weights.shape[:2], -1)


class GradientStep(GradientSuffix):
    """One step of the exact gradient from tokens."""

    def enter(self, inputs: Tensor) -> Tensor:
        """As `GradientSuffix.enter`, from tokens (rows, S)."""
        hidden = self.trunk.embed(inputs)
        return self.run(self.stacks[0], hidden, None) if len(self.stacks) > 1 else hidden


class State(Method):
    """B and the optimizer's state, read."""

    def forward(self) -> Tensor:
        """Returns both in one vector, B first."""
        return self.state.optimized + 0.0


class Restore(Method):
    """B and the optimizer's state, written."""

    def forward(self, state: Tensor) -> Tensor:
        """state: as `State` gives it. Returns its first element (1,)."""
        self.state.optimized.copy_(state)
        return state[:1] + 0.0
