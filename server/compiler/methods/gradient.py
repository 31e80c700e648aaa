"""Steps with the exact gradient (estimators `gradient` and `directional`): forward, the loss's gradient, and the layers
in reverse.

The forward pass keeps each adapted layer's input; every reverse pass computes its layer again from it. A recipe's
micro-batches are computed one after the other, and their gradients are added up.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from server.compiler.methods.clipping import noised_sums, single_rows
from server.compiler.methods.optimizers import Rates
from server.compiler.methods.private_gradient import ExampleGradients, GradientSecret, mean_gradient, noise_units
from server.compiler.methods.training import EXCLUDED, Method, Network, Stack, micro_batches
from server.compiler.model.backbone import Trunk
from server.compiler.model.quantization import SCALE
from server.compiler.model.reverse import norm_output, norm_reverse, normed
from shared.privacy import UNITS
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

        That is the gradient's norm [1] with estimator `gradient`, and the coefficients (q,) with `directional`. Where
        the recipe clips, totals stand in place of the loss.
        """
        if self.recipe.privacy == "clipped":
            private = self.descend_privately if self.recipe.estimator == "gradient" else self.project_privately
            return private(inputs, positions, *rest)
        *labels, mask = rest[:-3]
        loss, gradient = self.differentiate(inputs, positions, labels, mask)
        if self.recipe.estimator == "directional":
            seeds, lr, _ = rest[-3:]
            return loss, self.state.project(gradient, seeds, lr)
        return loss, self.state.update(gradient, Rates(*rest[-3:]))

    def descend_privately(self, inputs: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """One DP-SGD step (Abadi et al., CCS'16): totals, int32 (D,), and the norm [1] of the noised mean gradient.

        rest: labels, mask, the `Rates`, then a `GradientSecret`.
        """
        *labels, mask = rest[:-8]
        rates, secret = Rates(*rest[-8:-5]), GradientSecret(*rest[-5:])
        totals = secret.carried
        for gradients in self.example_gradients(inputs, positions, labels, mask):
            totals = totals + gradients.clipped_sum(secret)
        totals = totals + noise_units(secret, totals.shape[0])
        gradient = mean_gradient(totals, secret, self.recipe.effective_batch)
        return totals, self.state.update(gradient, rates, secret.last)

    def project_privately(self, inputs: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """Noised totals (q,) of the examples' projected gradients, and coefficients (q,).

        rest: labels, mask, seeds, lr, eps, clip, carried.
        """
        *labels, mask = rest[:-5]
        seeds, lr, _, clip, totals = rest[-5:]
        for gradients in self.example_gradients(inputs, positions, labels, mask):
            projections = self.state.projections(gradients.rows(), seeds)  # (q, rows)
            totals = noised_sums(projections, clip, totals)
        mean = totals * (clip / UNITS) / self.recipe.effective_batch
        coefficients = mean * (lr / self.recipe.queries)
        self.state.replay(seeds, coefficients, lr)
        return totals, coefficients

    def example_gradients(
        self, inputs: Tensor, positions: Tensor, labels: Sequence[Tensor], mask: Tensor
    ) -> Iterator[ExampleGradients]:
        """Yields the gradients of each micro-batch's examples; an example's loss is the mean over its answer tokens."""
        weights = mask / torch.clamp(mask.sum(dim=1, keepdim=True), min=1.0)
        for part in micro_batches(self.recipe, inputs, positions, *labels, weights):
            _, parts = self.gradients(*part)
            yield ExampleGradients(parts)

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
        nll, parts = self.gradients(inputs, positions, *rest)
        sums = [part.sum(dim=0) for part in parts]
        total = torch.cat(sums) if len(sums) > 1 else sums[0]
        return (nll * rest[-1]).reshape(-1).sum(dim=0, keepdim=True), total

    def gradients(self, inputs: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Negative log-likelihoods (rows, T), and the gradient of each row's sum over `mask` in B, by adapted layer.

        rest: labels, then the mask (rows, T). The gradients are (rows, slab) each; side by side they are (rows, D).
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
        if self.recipe.privacy == "clipped":
            nll, gradient = self.answers_gradient_by_row(hidden, positions, labels, mask)
        else:
            nll, gradient = self.answers_gradient(hidden, positions, labels, mask)
        parts: list[Tensor] = []
        for place in reversed(range(len(kept))):
            scales = () if self.scales is None else (self.scales[place],)
            gradient = self.reverses[place](kept[place], gradient, *others[place], *scales)
            if stack.shapes[place].targets:
                gradient, by_example = gradient
                parts.append(by_example)  # (rows, slab)
        return nll, parts[::-1]

    def answers_gradient_by_row(
        self, hidden: Tensor, positions: Tensor, labels: Sequence[Tensor], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `answers_gradient`, each example by itself: products over few rows round a row by its place among them."""
        columns = [single_rows(column) for column in (hidden, positions, mask, *labels)]
        found = [self.answers_gradient(h, p, own, m) for h, p, m, *own in zip(*columns, strict=True)]
        nll, gradient = (torch.cat(rows) if len(rows) > 1 else rows[0] for rows in zip(*found, strict=True))
        return nll, gradient

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
