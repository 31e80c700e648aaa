"""A recipe's network with exact gradients: forward layers as everywhere, and a reverse pass of each adapted part's.

Each kind of reverse layer is lowered once, as forward layers are.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

from server.compiler.export.emission import Signature
from server.compiler.export.lowering import Example
from server.compiler.export.network import BaseNetwork, layer_example, lower_by_shape, score_suffix
from server.compiler.methods.gradient import GradientStep, GradientSuffix, Restore, State
from server.compiler.methods.optimizers import state_size
from server.compiler.methods.step_inputs import StepInputs, zero_seeds, zero_tokens
from server.compiler.methods.training import Adapter, Load, Prefix, Replay, Score, ScoreSuffix, Stack
from server.compiler.model.decoder import LayerShape
from server.compiler.model.reverse import KeepingLayer, Kept, ReverseLayer, ReversePass
from server.compiler.model.rounding import SCALE
from server.compiler.model.vocabulary_head import HeadReverse
from shared.program import last_layer_picks, lowers_softmax
from shared.program_inputs import MIN_LENGTH


class GradientNetwork(BaseNetwork):
    """Everything that the methods of a recipe with exact gradients share."""

    def reverses(self, stack: Stack) -> tuple[Stack, list[nn.Module]]:
        """The stack and its reverse passes, lowered if they are to be.

        Where layers are not lowered, the stack's are those that the reverse passes hold: a weight has one name in a
        graph, the one that the weights file knows it by.
        """
        layers = self._layers(stack)
        for layer in layers:
            layer.drop_forward()
        lowered = lower_by_shape(self._lower, [ReversePass(layer) for layer in layers], stack.shapes, self._example)
        if not any(isinstance(each, ReversePass) for each in lowered):
            return stack, lowered
        layers = self._layers(stack)
        return Stack(stack.shapes, layers, stack.first), [ReversePass(layer) for layer in layers]

    def _layers(self, stack: Stack) -> list[ReverseLayer]:
        """The stack's layers with their reverse."""
        return [
            ReverseLayer(shape, self._base.layers[index], self._scaled_a[index])
            for index, shape in enumerate(stack.shapes, stack.first)
        ]

    def scales(self, stack: Stack) -> Tensor | None:
        """The scales of the stack's linear weights, side by side, (layers, most outputs); None: rows have none."""
        if not stack.shapes[0].scales_rows:
            return None
        indices = range(stack.first, stack.first + len(stack.shapes))
        scales = [torch.cat([self._base.layers[at][target + SCALE] for target in self.facts.linears]) for at in indices]
        widest = max(len(of_layer) for of_layer in scales)
        return torch.stack([functional.pad(of_layer, (0, widest - len(of_layer))) for of_layer in scales])

    def head_reverse(self, rows: int, picks: int) -> nn.Module | None:
        """The lowered reverse of lm_head over a quantized table, for as many positions as `head`.

        None: the loss has no logits over the vocabulary, `head` multiplies, or the backend lowers nothing.
        """
        values, scales = self.backbone.head_table()
        softmax = lowers_softmax(self.recipe, rows * picks, self.facts.vocabulary)
        if scales is None or self.recipe.loss == "candidates" or softmax:
            return None
        layer = HeadReverse(values)
        lowered = self._lowered_head(layer, self.part_of(rows, picks, self.facts.vocabulary), scales)
        return None if lowered is layer else lowered

    def methods(self) -> dict[str, Signature]:
        """Every method of the program with its example inputs, as `shared.program` lists them."""
        recipe, backbone, size = self.recipe, self.backbone, self.size
        e, s, t, c = recipe.effective_batch, recipe.sequence_length, recipe.answer_length, recipe.choices
        rows, frozen = recipe.rows, recipe.frozen_layers(self.facts.layers)
        head = self.answer_head(rows, t)
        # A private step computes each example's answers by itself.
        at_once = 1 if recipe.privacy == "clipped" else rows
        multiplies = lowers_softmax(recipe, at_once * t, self.facts.vocabulary)
        step_head = self.answer_head(at_once, t, reverse=True) if multiplies or at_once < rows else head
        heads = (step_head, self.head_reverse(at_once, t))
        below = [self.stack(rows, 1, slice(0, frozen), adapted=False)] if frozen else []
        picks = last_layer_picks(recipe)
        adapted, reverses = self.reverses(self.stack(rows, 1, slice(frozen, None), kind=KeepingLayer, picks=picks))
        backward = (reverses, self.scales(adapted))
        inputs = StepInputs.example(recipe, size).flat
        length = {0: {1: Dim("S", min=MIN_LENGTH, max=s)}} if self.dynamic_length else {}
        step = GradientStep(recipe, size, backbone, *heads, *backward, *below, adapted)
        methods = {
            "step": Signature(step, (zero_tokens(e, s), *inputs), length),
            "score": Signature(
                Score(recipe, size, backbone, head, *below, adapted),
                (zero_tokens(rows, s), zero_tokens(rows, t), zero_tokens(rows, t, c)),
                length,
            ),
            "adapter": Signature(Adapter(recipe, size), ()),
            "load": Signature(Load(recipe, size), (torch.zeros(size),)),
        }
        if recipe.keeps_optimizer:
            state = torch.zeros(state_size(recipe.optimizer, size))
            methods["state"] = Signature(State(recipe, size), ())
            methods["restore"] = Signature(Restore(recipe, size), (state,))
        if recipe.estimator == "directional":
            methods["replay"] = Signature(
                Replay(recipe, size), (zero_seeds(recipe.queries), torch.zeros(recipe.queries))
            )
        if frozen:
            hidden = torch.zeros(e, s, self.facts.hidden)
            suffix = GradientSuffix(recipe, size, backbone, *heads, *backward, adapted)
            methods["prefix"] = Signature(Prefix(recipe, size, backbone, head, *below), (zero_tokens(e, s),), length)
            methods["suffix"] = Signature(suffix, (hidden, *inputs), length)
            methods["score_suffix"] = score_suffix(
                ScoreSuffix(recipe, size, backbone, head, adapted), self.facts.hidden, length
            )
        return methods

    def _example(self, shape: LayerShape) -> Example:
        """Inputs that a reverse pass is exported with."""
        inputs = layer_example(shape, self.recipe.sequence_length)
        states, others = (inputs[:2], inputs[2:]) if shape.picks else (inputs[:1], inputs[1:])
        scales = (torch.ones(shape.outputs),) if shape.scales_rows else ()
        kept = [torch.zeros(*states[0].shape[:2], width) for width in Kept.widths(shape)]
        return (*states, *kept, torch.zeros_like(states[-1]), *others, *scales)
