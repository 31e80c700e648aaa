"""Steps with the exact gradient (estimators `gradient` and `directional`): forward, the loss's gradient, and the layers
in reverse.

The forward pass keeps each adapted layer's input and what `KeepingLayer` names; every reverse pass computes the rest
of its layer again. A recipe's micro-batches are computed one after the other, and their gradients are added up.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from server.compiler.methods.preferences import example_count, preference_losses
from server.compiler.methods.private_gradient import (
    clipped_sum,
    mean_gradient,
    noise_units,
    noised_sums,
    single_rows,
)
from server.compiler.methods.step_inputs import StepInputs
from server.compiler.methods.training import EXCLUDED, Method, Network, Stack, picked_log_probabilities
from server.compiler.model.backbone import Backbone, leading, picked_states, states_for
from server.compiler.model.pointwise_reverse import norm_output, norm_reverse, normed
from shared.privacy import UNITS
from shared.program import lowers_softmax
from shared.recipe import PREFERENCE_LOSSES, Recipe

PIECE = 4096  # rows of a quantized table that are in float32 at once


class GradientSuffix(Network):
    """One step of the exact gradient from the prefix's hidden states."""

    def __init__(
        self,
        recipe: Recipe,
        size: int,
        backbone: Backbone,
        head: nn.Module | None,
        head_reverse: nn.Module | None,
        reverses: Sequence[nn.Module],
        scales: Tensor | None,
        *stacks: Stack,
    ) -> None:
        """head_reverse: a lowered `HeadReverse`; None: it is in `head`, or `table_product` multiplies in float32.

        reverses: of the last stack's layers. scales: of their linear weights, (layers, outputs); None: float32."""
        super().__init__(recipe, size, backbone, head, *stacks)
        self.head_reverse = head_reverse
        self.reverses = list(reverses)  # no submodules: a layer that is not lowered is already one
        self.register_buffer("scales", scales, persistent=False)
        # One longer than the bound: an exporter takes a slice of the whole for no slice.
        self.register_buffer("at", torch.arange(recipe.sequence_length + 1), persistent=False)
        positions = recipe.answer_length * (1 if recipe.privacy == "clipped" else recipe.rows)
        self.head_multiplies = lowers_softmax(recipe, positions, backbone.facts.vocabulary)

    def forward(self, first: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """One step. first: hidden states or tokens. inputs: those of `StepInputs`.

        Returns the loss [1] at the B of before, and what the update gives: the gradient's norm [1] with estimator
        `gradient`, the coefficients (q,) with `directional`. Where the recipe clips, totals stand in place of the loss.
        """
        step_inputs, exact = StepInputs.of(self.recipe, inputs), self.recipe.estimator == "gradient"
        if self.recipe.privacy == "clipped":
            return self.descend_privately(first, step_inputs) if exact else self.project_privately(first, step_inputs)
        loss, gradient = self.differentiate(first, step_inputs)
        if exact:
            return loss, self.state.update(gradient, step_inputs)
        return loss, self.state.project(gradient, step_inputs.seeds, step_inputs.lr)

    def descend_privately(self, first: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """One DP-SGD step (Abadi et al., CCS'16): totals, int32 (D,), and the norm [1] of the noised mean gradient."""
        totals = inputs.carried
        for gradients in self.example_gradients(first, inputs):
            totals = totals + clipped_sum(gradients, inputs)
        totals = totals + noise_units(inputs, totals.shape[0])
        gradient = mean_gradient(totals, inputs, self.recipe.effective_batch)
        return totals, self.state.update(gradient, inputs, inputs.last)

    def project_privately(self, first: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Noised totals (q,) of the examples' projected gradients, and coefficients (q,)."""
        totals = inputs.carried
        for gradients in self.example_gradients(first, inputs):
            rows = torch.cat(gradients, dim=1) if len(gradients) > 1 else gradients[0]  # (rows, D)
            projections = self.state.projections(rows, inputs.seeds)  # (q, rows)
            totals = noised_sums(projections, inputs.clip, totals)
        mean = totals * (inputs.clip / UNITS) / self.recipe.effective_batch
        coefficients = mean * (inputs.lr / self.recipe.queries)
        self.state.replay(inputs.seeds, coefficients, inputs.lr)
        return totals, coefficients

    def example_gradients(self, first: Tensor, inputs: StepInputs) -> Iterator[list[Tensor]]:
        """Yields the `gradients` of each micro-batch's examples; its loss is the mean over its answer tokens."""
        weights = inputs.mask / torch.clamp(inputs.mask.sum(dim=1, keepdim=True), min=1.0)
        for part in replace(inputs, mask=weights).micro_batches(self.recipe, first):
            yield self.gradients(*part)[1]

    def enter(self, first: Tensor) -> Tensor:
        """The hidden states (rows, S, hidden) before the last stack, from a method's first input."""
        return first

    def differentiate(self, first: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """The mean loss [1] over the answer tokens, or over the examples of preferences, and its gradient (D,) in B.

        first: (E, ...).
        """
        part, *others = inputs.micro_batches(self.recipe, first)
        nll, gradient = self.sums(*part)
        for other in others:  # each is added before the next one is computed, so that one gradient is kept
            more = self.sums(*other)
            nll, gradient = nll + more[0], gradient + more[1]
        if self.recipe.loss in PREFERENCE_LOSSES:
            count = example_count(inputs)
        else:
            count = torch.clamp(inputs.mask.reshape(-1).sum(dim=0, keepdim=True), min=1.0)
        return nll / count, gradient / count

    def sums(self, first: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """The loss [1] summed over the answer tokens or the examples of one micro-batch, and its gradient (D,) in B."""
        nll, parts = self.gradients(first, inputs)
        losses: Tensor | None = None
        if self.recipe.loss in PREFERENCE_LOSSES:
            losses, by_row = preference_losses(self.recipe, nll, inputs)
            parts = [part * by_row.reshape(-1, 1) for part in parts]
        sums = [part.sum(dim=0) for part in parts]
        total = torch.cat(sums) if len(sums) > 1 else sums[0]
        return (nll * inputs.mask if losses is None else losses).reshape(-1).sum(dim=0, keepdim=True), total

    def gradients(self, first: Tensor, inputs: StepInputs) -> tuple[Tensor, list[Tensor]]:
        """Negative log-likelihoods (rows, T), and the gradient of each row's sum over `mask` in B, by adapted layer.

        The gradients are (rows, slab) each; side by side they are (rows, D).
        """
        entered = self.enter(first)
        stack = self.stacks[-1]
        length, positions = entered.shape[1], inputs.positions
        hidden, states, others = self.through(entered, self.state.current(), positions)
        if self.recipe.privacy == "clipped":
            nll, gradient = self.answers_gradient_by_row(hidden, inputs)
        else:
            start = self.through(entered, inputs.start, positions)[0] if self.recipe.kl else None
            nll, gradient = self.answers_gradient(hidden, inputs, start)
        parts: list[Tensor] = []
        for place in reversed(range(len(states))):
            scales = () if self.scales is None else (leading(self.scales[place], stack.shapes[place].outputs),)
            results = self.reverses[place](*states[place], gradient, *others[place], *scales)
            gradient, *more = (results,) if isinstance(results, Tensor) else results
            if stack.shapes[place].targets:
                parts.append(more.pop())  # (rows, slab)
            if more:
                gradient = gradient + self.at_positions(more.pop(), positions, length)
        return nll, parts[::-1]

    def through(
        self, hidden: Tensor, b: Tensor, positions: Tensor
    ) -> tuple[Tensor, list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]:
        """hidden (rows, S, hidden) through the last stack at B (D,).

        Returns its result, and of each layer what its reverse pass reads: what entered with what was kept, and the
        layer's other inputs.
        """
        stack = self.stacks[-1]
        states: list[tuple[Tensor, ...]] = []
        others = list(self.backbone.others(stack.shapes, stack.first, hidden.shape[1], b.unsqueeze(0), positions))
        for layer, shape, other in zip(stack.layers, stack.shapes, others, strict=True):
            entering = states_for(shape, hidden, positions)
            output = layer(*entering, *other)
            hidden, *kept = (output,) if isinstance(output, Tensor) else output
            states.append((*entering, *kept))
        return hidden, states, others

    def answers_gradient_by_row(self, hidden: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """As `answers_gradient`, one example at a time: rounding of small products depends on a row's position."""
        columns = inputs.columns
        rows = zip(*(single_rows(column) for column in (hidden, *columns.values())), strict=True)
        by_row = [
            self.answers_gradient(own, replace(inputs, **dict(zip(columns, others, strict=True))))
            for own, *others in rows
        ]
        nll, gradient = (torch.cat(rows) if len(rows) > 1 else rows[0] for rows in zip(*by_row, strict=True))
        return nll, gradient

    def answers_gradient(
        self, hidden: Tensor, inputs: StepInputs, start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Negative log-likelihoods (E, T), and the gradient of their sum over `mask` (E, T) by `hidden`.

        Not of their mean: the last bits of a small gradient would be lost where activations are quantized.
        hidden: (E, S, hidden), or (E, T, hidden) at the positions alone if the last layer has picks. start: the same at
        the B before training; the gradient is then that of the log-likelihoods and the weighted divergence.
        """
        backbone, length = self.backbone, hidden.shape[1]
        picked = bool(self.stacks[-1].shapes[-1].picks)
        normed_answers, *others = (
            normed(backbone.final_norm, each if picked else picked_states(each, inputs.positions))
            for each in (hidden, *(() if start is None else (start,)))
        )  # (E, T, hidden)
        vectors = backbone.final_vectors()
        answers, *at_start = (norm_output(each, *vectors) for each in (normed_answers, *others))
        if self.recipe.loss != "candidates":
            truth = inputs.answers.to(torch.int64)
            compute = partial(self.vocabulary_gradient, inputs.kl_weight)
            nll, gradient = self.in_parts(compute, answers, truth, *at_start)
        else:
            nll, gradient = self.candidates_gradient(answers, inputs, *at_start)
        gradient = norm_reverse(backbone.final_norm, gradient * inputs.mask.unsqueeze(2), vectors[0], normed_answers)
        return nll, gradient if picked else self.at_positions(gradient, inputs.positions, length)

    def at_positions(self, gradient: Tensor, positions: Tensor, length: int) -> Tensor:
        """gradient (E, T, hidden) at `positions` (E, T) of sequences of `length`, zero elsewhere: (E, S, hidden).

        By a product with ones and zeros: positions of padding may coincide with others.
        """
        at = self.at[:length].reshape(1, -1, 1) == positions.unsqueeze(1)  # (E, S, T)
        return torch.bmm(at.to(torch.float32), gradient).view(-1, length, self.backbone.facts.hidden)

    def vocabulary_gradient(
        self, kl_weight: Tensor, answers: Tensor, truth: Tensor, start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss over the whole vocabulary of one part (rows, tokens): nll and its gradient, (rows, tokens, hidden).

        A softmax p's negative log-likelihood has the gradient p - 1 at the truth, p elsewhere, and the divergence
        KL(p_start || p) has p - p_start. start: as `answers`, at the B before training.
        """
        at, row = truth.unsqueeze(2), self.backbone.head_rows(truth)
        if self.head_multiplies:
            scales = self.backbone.head_table()[1]
            inputs = () if scales is None else (scales,)
            logits, weights, product = self.vocabulary(answers, *inputs)
            if start is not None:
                product = product + (product - self.vocabulary(start, *inputs)[2]) * kl_weight
            slope = self.cap_slope(torch.gather(logits, 2, at))
            return (
                -picked_log_probabilities(logits, weights, at).squeeze(2),
                product - (row if slope is None else row * slope),
            )
        (logits,) = self.vocabulary(answers)
        log_p = torch.log_softmax(logits, dim=-1)
        slope = self.cap_slope(logits)
        weights = torch.exp(log_p)
        if slope is not None:
            weights, row = weights * slope, row * torch.gather(slope, 2, at)
        product = self.table_product(weights)
        if start is not None:
            at_start = self.table_product(torch.softmax(self.vocabulary(start)[0], dim=-1))
            product = product + (product - at_start) * kl_weight
        return -torch.gather(log_p, 2, at).squeeze(2), product - row

    def candidates_gradient(
        self, answers: Tensor, inputs: StepInputs, start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss over the candidates (E, T, C), the first is the truth: nll (E, T), its gradient (E, T, hidden).

        start: as of `vocabulary_gradient`.
        """
        examples, tokens, count = inputs.choices.shape
        rows = self.backbone.head_rows(inputs.choices).reshape(examples * tokens, count, -1)

        def logits_of(states: Tensor) -> Tensor:
            flat = torch.bmm(rows, states.reshape(examples * tokens, -1, 1))
            return self.backbone.cap(flat.reshape(examples, tokens, count))

        logits, excluded = logits_of(answers), (1.0 - inputs.choice_mask) * EXCLUDED
        log_p = torch.log_softmax(logits + excluded, dim=-1)
        p = torch.exp(log_p)
        weights = torch.cat((p[:, :, :1] - 1.0, p[:, :, 1:]), dim=2) if count > 1 else p - 1.0
        if start is not None:
            weights = weights + (p - torch.softmax(logits_of(start) + excluded, dim=-1)) * inputs.kl_weight
        slope = self.cap_slope(logits)
        weights = (weights if slope is None else weights * slope).reshape(examples * tokens, 1, count)
        return -log_p[:, :, 0], torch.bmm(weights, rows).reshape(answers.shape)

    def cap_slope(self, logits: Tensor) -> Tensor | None:
        """The soft cap's slope at capped logits, 1 - tanh^2; None: the base has no cap."""
        cap = self.backbone.facts.final_softcap
        if cap is None:
            return None
        bent = logits * (1 / cap)
        return 1.0 - bent * bent

    def table_product(self, weights: Tensor) -> Tensor:
        """weights (E, T, V), not negative, times lm_head's table (V, hidden): (E, T, hidden)."""
        table, scales = self.backbone.head_table()
        if self.head_reverse is not None:
            product: Tensor = self.head_reverse(weights, scales)
            return product
        if scales is None:
            return torch.mm(weights.reshape(-1, table.shape[0]), table).reshape(*weights.shape[:2], -1)
        # The scales are folded in, without a view of a constant that another file holds.
        flat = (weights.unsqueeze(3) * scales).squeeze(3).reshape(-1, table.shape[0])
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

    def enter(self, first: Tensor) -> Tensor:
        """As `GradientSuffix.enter`, from tokens (rows, S)."""
        hidden = self.backbone.embed(first)
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
