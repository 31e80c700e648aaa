"""The methods of a training program as modules: a MobiZO step (paper, Algorithm 1), replay, score, adapter, load.

All methods share the same state. Methods that run layers use the same shapes, so each layer is lowered once.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from server.compiler.methods.estimators import state_of
from server.compiler.methods.preferences import example_count, preference_losses
from server.compiler.methods.private_gradient import example_means, noised_sums
from server.compiler.methods.step_inputs import StepInputs, micro_batches
from server.compiler.model.answer_paths import answer_tables
from server.compiler.model.backbone import Backbone, picked_states
from server.compiler.model.decoder import LayerShape
from shared.privacy import UNITS
from shared.program import logits_part
from shared.recipe import PREFERENCE_LOSSES, Recipe

EXCLUDED = -1e9  # replaces the logit of a padded choice


@dataclass(frozen=True)
class Stack:
    """Consecutive decoder layers of one base, lowered or not, from layer `first` on."""

    shapes: Sequence[LayerShape]
    layers: Sequence[nn.Module]
    first: int


class Method(nn.Module):
    """A method of one program: the state that holds B, and the recipe it was made from."""

    def __init__(self, recipe: Recipe, size: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.state: Any = state_of(recipe, size)  # the estimator decides of which class


class Network(Method):
    """A method that runs the base model."""

    def __init__(self, recipe: Recipe, size: int, backbone: Backbone, head: nn.Module | None, *stacks: Stack) -> None:
        """head: a lowered `HeadLayer` or `SoftmaxHead`; None: the backbone's float32 table."""
        super().__init__(recipe, size)
        self.backbone = backbone
        self.head = head
        self.stacks = stacks
        # Named by their place in the base, as the weights file names their tensors.
        self.layers = nn.ModuleDict(
            {str(index): layer for stack in stacks for index, layer in enumerate(stack.layers, stack.first)}
        )

    def run(self, stack: Stack, hidden: Tensor, b: Tensor | None) -> Tensor:
        """hidden (R, S, hidden) through one stack's layers."""
        return self.backbone.forward_layers(stack.layers, stack.shapes, stack.first, hidden, b)

    def answers_of(self, hidden: Tensor, b: Tensor, positions: Tensor) -> Tensor:
        """Normed hidden states (R, T, hidden) at `positions` (R, T) after the last stack; hidden: (R, S, hidden)."""
        stack, backbone = self.stacks[-1], self.backbone
        hidden = backbone.forward_layers(stack.layers, stack.shapes, stack.first, hidden, b, positions)
        if stack.shapes[-1].picks:
            return backbone.final_norm(hidden, *backbone.final_vectors())
        return backbone.gather_positions(hidden, positions)

    def log_probabilities(self, answers: Tensor, choices: Tensor) -> Tensor:
        """Log-softmax over the whole vocabulary at `answers` (R, T, hidden), of `choices` (R, T, C): (R, T, C)."""
        (log_p,) = self.in_parts(self.part_log_probabilities, answers, choices.to(torch.int64))
        return log_p

    def part_log_probabilities(self, answers: Tensor, choices: Tensor) -> tuple[Tensor]:
        """As `log_probabilities`, of one part."""
        logits, *lowered = self.vocabulary(answers)
        if lowered:
            return (picked_log_probabilities(logits, lowered[0], choices),)
        return (torch.gather(torch.log_softmax(logits, -1), 2, choices),)

    def vocabulary(self, answers: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
        """Capped logits over the whole vocabulary of one part's `answers` (rows, tokens, hidden).

        Followed by what a `SoftmaxHead` returns besides; scales: see there.
        """
        output = self.backbone.logits(answers) if self.head is None else self.head(answers, *scales)
        return (self.backbone.cap(output),) if isinstance(output, Tensor) else tuple(output)

    def in_parts(self, compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Calls `compute` with parts of `inputs` (R, T, ...) as large as `logits_part` allows, and joins its results.

        Several parts are (1, positions, ...) each. Each part's logits are freed before the next part's are computed, so
        the runtime plans memory for one part.
        """
        rows, tokens = inputs[0].shape[:2]
        positions = rows * tokens
        size = logits_part(positions, self.backbone.facts.vocabulary)
        if size == positions:
            return compute(*inputs)
        flat = [each.reshape(1, positions, *each.shape[2:]) for each in inputs]
        results = []
        for at in range(0, positions, size):
            start = min(at, positions - size)
            outputs = compute(*(each[:, start : start + size] for each in flat))
            results.append([each[:, at - start :] if at > start else each for each in outputs])
        joined = [torch.cat(parts, 1) for parts in zip(*results, strict=True)]
        return tuple(each.reshape(rows, tokens, *each.shape[2:]) for each in joined)

    def choice_logits(self, answers: Tensor, choices: Tensor) -> Tensor:
        """Logits of `choices` (E, T, C) alone, by their rows of lm_head: (R, T, C) for `answers` (R, T, hidden)."""
        examples, tokens, count = choices.shape
        rows = self.backbone.head_rows(choices)  # (E, T, C, hidden)
        rows = rows.reshape(examples * tokens, count, -1)
        by_path = answers.reshape(self.recipe.answer_paths, examples * tokens, -1).permute(1, 2, 0)  # (E*T, hidden, n)
        logits = torch.bmm(rows, by_path)  # (E*T, C, n)
        return self.backbone.cap(logits.permute(2, 0, 1).reshape(-1, tokens, count))


def picked_log_probabilities(logits: Tensor, softmax: Tensor, choices: Tensor) -> Tensor:
    """The log-probabilities (R, T, C) of int64 `choices`, from logits (R, T, V) and their softmax.

    By the likeliest token, whose probability is at least 1 / V; that of others may be 0 in float32.
    """
    partition = torch.amax(logits, -1, keepdim=True) - torch.log(torch.amax(softmax, -1, keepdim=True))
    return torch.gather(logits, 2, choices) - partition


class Prefix(Network):
    """The frozen layers below the first adapted one. Their output for an example is the same in every step."""

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (E, S) -> hidden (E, S, hidden)."""
        parts = micro_batches(self.recipe, tokens)
        hidden = [self.run(self.stacks[0], self.backbone.embed(part), None) for (part,) in parts]
        return torch.cat(hidden) if len(hidden) > 1 else hidden[0]


class AnswerPass(nn.Module):
    """The layers of one stack at the answer's positions of every path; see `server.compiler.model.answer_paths`."""

    def __init__(self, stack: Stack, length: int) -> None:
        """stack: of `AnswerLayer`s. length: S."""
        super().__init__()
        self.stack = stack
        self.layers = nn.ModuleList(stack.layers)
        # One longer than the bound, because the exporter takes a slice of the whole for no slice.
        self.register_buffer("at", torch.arange(length + 1, dtype=torch.int32), persistent=False)

    def forward(
        self, keyed: Stack, backbone: Backbone, hidden: Tensor, inputs: StepInputs, b: Sequence[Tensor]
    ) -> Tensor:
        """Normed hidden states (R, T, hidden) at the answer's positions.

        keyed: the same layers with keys and values, for whole sequences (E, S, hidden). b: (1, D), the current B that
        they run with, and (q, D), that of every path.
        """
        facts, paths, length = backbone.facts, b[1].shape[0], hidden.shape[1]
        positions = inputs.positions
        picked = picked_states(hidden, positions).repeat(paths, 1, 1)  # (R, T, hidden)
        tables = [
            answer_tables(facts, kind, positions, inputs.mask, self.at[:length], paths) for kind in backbone.tables
        ]
        others = list(backbone.others(keyed.shapes, keyed.first, length, b[0]))
        at = 0
        for place, (layer, keyed_layer, shape) in enumerate(zip(self.layers, keyed.layers, keyed.shapes, strict=True)):
            index = keyed.first + place
            hidden, keys, values = keyed_layer(hidden, *others[place])
            slab: tuple[Tensor, ...] = ()
            if shape.targets:
                slab = (b[1][:, at : at + shape.slab],)
                at += shape.slab
            masks_and_tables = tables[facts.kind(index)]
            picked = layer(
                picked, keys, values, *masks_and_tables[:2], *slab, *backbone.vectors(index), *masks_and_tables[2:]
            )
        return backbone.final_norm(picked, *backbone.final_vectors())


class Suffix(Network):
    """One MobiZO step from the prefix's hidden states: perturb, forward all 2q paths, estimate, update."""

    def __init__(
        self,
        recipe: Recipe,
        size: int,
        backbone: Backbone,
        head: nn.Module | None,
        *stacks: Stack,
        answer_pass: AnswerPass | None = None,
    ) -> None:
        """answer_pass: of a recipe that perturbs the answer's positions alone."""
        super().__init__(recipe, size, backbone, head, *stacks)
        self.answer_pass = answer_pass

    def nll(self, hidden: Tensor, inputs: StepInputs, b: Tensor) -> Tensor:
        """Negative log-likelihoods (R, T) of the answer tokens, at every path's B (2q, D)."""
        paths, answers = self.recipe.answer_paths, self.answers(hidden, inputs, b)
        if self.recipe.loss != "candidates":
            truth = inputs.answers.repeat(paths, 1)
            return -self.log_probabilities(answers, truth.unsqueeze(2)).squeeze(2)
        logits = self.choice_logits(answers, inputs.choices)
        logits = logits + ((1.0 - inputs.choice_mask) * EXCLUDED).repeat(paths, 1, 1)
        return -torch.log_softmax(logits, dim=-1)[:, :, 0]

    def answers(self, hidden: Tensor, inputs: StepInputs, b: Tensor) -> Tensor:
        """Normed hidden states (R, T, hidden) at the answer's positions, at every path's B (2q, D)."""
        if self.answer_pass is not None:
            current = self.state.current().unsqueeze(0)
            return self.answer_pass(self.stacks[-1], self.backbone, hidden, inputs, (current, b))
        paths = self.recipe.paths
        return self.answers_of(hidden.repeat(paths, 1, 1), b, inputs.positions.repeat(paths, 1))

    def forward(self, hidden: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """One step. inputs: those of `StepInputs`.

        Returns the losses (2q,), at B + eps z and then at B - eps z, and coefficients (q,); only at B + eps z, (q,),
        where the answer's positions alone are perturbed. Where the recipe clips, the
        noised totals (q,) stand in place of the losses, which stay inside the program.
        """
        return self.descend(hidden, StepInputs.of(self.recipe, inputs))

    def descend(self, hidden: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """As `forward`."""
        queries = self.recipe.queries
        paths, z = self.state.perturb(inputs.seeds, inputs.eps)
        nll = self.nll(hidden, inputs, paths)
        per_path = nll.reshape(self.recipe.answer_paths, -1)  # (paths, E*T)
        if self.recipe.loss in PREFERENCE_LOSSES:
            losses, _ = preference_losses(self.recipe, nll, inputs)
            reported = losses.sum(dim=1) / example_count(inputs)
            difference = self.differences(reported)
        elif self.recipe.privacy == "none":
            weight = inputs.mask.reshape(1, -1)
            reported = (per_path * weight).sum(dim=1) / torch.clamp(weight.sum(dim=1), min=1.0)
            difference = self.differences(reported)
        else:
            differences = self.differences(example_means(per_path, inputs.mask))
            reported = noised_sums(differences, inputs.clip, inputs.carried)
            difference = reported * (inputs.clip / UNITS) / self.recipe.effective_batch
        step = inputs.eps if self.recipe.perturbed == "answers" else inputs.eps * 2.0
        projected_gradient = difference / step  # g_i
        coefficients = projected_gradient * (inputs.lr / queries)
        self.state.update(z, coefficients, inputs.eps)
        return reported, coefficients

    def differences(self, losses: Tensor) -> Tensor:
        """Differences (q, ...) of the paths' losses (2q, ...), l+ - l-.

        Of (q, ...), from their mean, where the answer's positions alone are perturbed. The mean holds what all
        directions share: the loss at B, and half of eps^2 times the trace of its second derivative.
        """
        if self.recipe.perturbed == "answers":
            return losses - losses.mean(dim=0, keepdim=True)
        queries = self.recipe.queries
        return losses[:queries] - losses[queries:]


class Step(Suffix):
    """One MobiZO step from tokens."""

    def forward(self, tokens: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """As `Suffix`, with tokens (E, S) in place of hidden states."""
        hidden = self.backbone.embed(tokens)
        if len(self.stacks) > 1:
            hidden = self.run(self.stacks[0], hidden, None)
        return super().forward(hidden, *inputs)


class Replay(Method):
    """The update of `step` alone, from its recorded coefficients."""

    def forward(self, seeds: Tensor, coefficients: Tensor, *eps: Tensor) -> Tensor:
        """seeds int32 (q, 2), coefficients (q,), and eps [1] for `stored`. Returns B's first element (1,)."""
        scale = eps[0] if eps else torch.zeros(1)
        return self.state.replay(seeds, coefficients, scale).reshape(-1)[:1] + 0.0


class ScoreSuffix(Network):
    """Log-probabilities under the current, unperturbed B, from the prefix's hidden states."""

    def forward(self, hidden: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
        """hidden (R, S, hidden), positions (R, T), choices (R, T, C). Returns (R, T, C)."""
        b = self.state.current().unsqueeze(0).repeat(self.recipe.paths, 1)
        return self.log_probabilities(self.answers_of(hidden, b, positions), choices)


class Score(ScoreSuffix):
    """Log-probabilities under the current, unperturbed B, from tokens."""

    def forward(self, tokens: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
        """As `ScoreSuffix`, with tokens (R, S) in place of hidden states."""
        hidden = self.backbone.embed(tokens)
        for stack in self.stacks[:-1]:
            hidden = self.run(stack, hidden, None)
        return super().forward(hidden, positions, choices)


class Adapter(Method):
    """Returns the current B."""

    def forward(self) -> Tensor:
        """Returns B (D,)."""
        return self.state.current()


class Load(Method):
    """Replaces B."""

    def forward(self, b: Tensor) -> Tensor:
        """b: float32 (D,). Returns its first element (1,)."""
        self.state.assign(b)
        return b[:1] + 0.0


class Flush(Method):
    """Applies the pending update of the last step (estimator `stored`)."""

    def forward(self) -> Tensor:
        """Returns B's first element (1,)."""
        b = self.state.current()
        self.state.assign(b)
        return b[:1]
