"""A decoder layer's reverse pass against autograd on the forward layer, for every architecture and target."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.model.decoder import DecoderLayer, LayerShape, LayerTables, quantized_layer
from server.compiler.model.reverse import ReverseLayer
from server.compiler.model.rounding import SCALE, dequantize
from shared.recipe import TARGETS, Precision, Target
from tests.server.compiler.conftest import CONFIGS, Architectures

ROWS, LENGTH = 3, 11
# Relative. In layers of 32 features; forward, int8 rounds activations too, which turns some of a rectifier's on or off.
ROUNDING: dict[Precision, float] = {"int8": 0.2, "int8-weight": 0.05}


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer of a base, random inputs for it, and a random gradient of its output."""

    shape: LayerShape
    weights: dict[str, torch.Tensor]
    scaled_a: dict[Target, torch.Tensor]
    inputs: tuple[torch.Tensor, ...]  # as DecoderLayer takes them
    gradient: torch.Tensor

    def expected(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """By autograd, in float64: the input's gradient, and B's of each example (slab,)."""
        double = [tensor.double() for tensor in self.inputs]
        hidden = double[0].requires_grad_()
        gradients = []
        for row in range(self.shape.rows):
            shape = dataclasses.replace(self.shape, rows=1)
            layer = DecoderLayer(shape, self.weights, self.scaled_a).double()
            slab = [double[1].detach().clone().requires_grad_()] if self.shape.targets else []
            output = layer(hidden[row : row + 1], *slab, *double[1 + len(slab) :])
            output.backward(self.gradient[row : row + 1].double())
            gradients += [each.grad[0] for each in slab]
        assert hidden.grad is not None
        return hidden.grad, gradients


def make_case(architectures: Architectures, name: str, targets: tuple[Target, ...], rank: int, index: int) -> Case:
    checkpoint = load_checkpoint(str(architectures.base(name).directory))
    facts, generator = checkpoint.facts, torch.Generator().manual_seed(rank)
    shape = LayerShape(facts, "fp32", paths=1, rows=ROWS, rank=rank, targets=targets)
    scaled_a = {target: torch.randn(rank, facts.features(target)[0], generator=generator) for target in targets}
    hidden, gradient = torch.randn(2, ROWS, LENGTH, facts.hidden, generator=generator)
    slab = (0.2 * torch.randn(1, shape.slab, generator=generator),) if targets else ()
    count, heads = len(facts.layer_norms), len(facts.head_norms)
    vectors = [checkpoint.norms[count * index + at] for at in range(count)]
    if checkpoint.head_norms is not None:
        vectors += [checkpoint.head_norms[heads * index + at] for at in range(heads)]
    tables = LayerTables(facts, LENGTH, facts.kind(index))(LENGTH)
    inputs = (hidden, *slab, *vectors, *tables)
    return Case(shape, checkpoint.layers[index], scaled_a, inputs, gradient)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def applicable(name: str) -> tuple[Target, ...]:
    return tuple(target for target in TARGETS if name != "opt" or target != "gate_proj")


@pytest.mark.parametrize(("name", "rank"), [*((name, 5) for name in CONFIGS), ("gemma3_text", 1)])
def test_gradients_of_all_targets_are_autograds(architectures: Architectures, name: str, rank: int) -> None:
    for index in range(3):  # sliding and full attention, where a base has both
        case = make_case(architectures, name, applicable(name), rank, index)
        layer = ReverseLayer(case.shape, case.weights, case.scaled_a)
        hidden, b = layer.reverse(case.inputs[0], *layer(*case.inputs)[1:], case.gradient, *case.inputs[1:])
        expected_hidden, expected_b = case.expected()
        assert relative(hidden, expected_hidden) < 1e-5
        at = 0
        for target in case.shape.targets:  # each by itself: a small one would hide among the others
            size = rank * case.shape.facts.features(target)[1]
            for row in range(ROWS):
                assert relative(b[row, at : at + size], expected_b[row][at : at + size]) < 1e-5, target
            at += size


@pytest.mark.parametrize("name", ["opt", "gemma3_text"])
def test_gradients_of_some_targets_or_none_are_autograds(architectures: Architectures, name: str) -> None:
    for targets in [(), *((target,) for target in applicable(name))]:
        case = make_case(architectures, name, targets, 3, 1)
        layer = ReverseLayer(case.shape, case.weights, case.scaled_a)
        hidden, *b = layer.reverse(case.inputs[0], *layer(*case.inputs)[1:], case.gradient, *case.inputs[1:])
        assert len(b) == bool(targets)
        expected_hidden, expected_b = case.expected()
        assert relative(hidden, expected_hidden) < 1e-5
        if targets:
            assert relative(b[0], torch.stack(expected_b)) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_at_picked_positions_is_the_whole_layer_there(architectures: Architectures, name: str) -> None:
    """Forwards the whole layer's states there; in reverse autograd's gradients of a loss that reads them alone."""
    positions = torch.tensor([[4, 10], [0, 7], [9, 9]])[:ROWS]
    places = positions.unsqueeze(2)
    for index in range(3):
        case = make_case(architectures, name, applicable(name), 5, index)
        facts = case.shape.facts
        gradient = torch.randn(ROWS, 2, facts.hidden, generator=torch.Generator().manual_seed(index))
        everywhere = torch.zeros_like(case.gradient).scatter_add_(1, places.expand_as(gradient), gradient)
        tables = LayerTables(facts, LENGTH, facts.kind(index))
        hidden, *others = case.inputs
        others = [*others[: len(others) - len(tables(LENGTH))], *tables.picked(LENGTH, positions)]
        picked = hidden.gather(1, places.expand_as(gradient))
        layer = ReverseLayer(dataclasses.replace(case.shape, picks=2), case.weights, case.scaled_a)
        whole = DecoderLayer(case.shape, case.weights, case.scaled_a)(*case.inputs)
        assert relative(layer(hidden, picked, *others), whole.gather(1, places.expand_as(gradient))) < 1e-5
        of_hidden, of_picked, b = layer.reverse(hidden, picked, gradient, *others)
        expected_hidden, expected_b = dataclasses.replace(case, gradient=everywhere).expected()
        assert relative(of_hidden.scatter_add(1, places.expand_as(gradient), of_picked), expected_hidden) < 1e-5
        assert relative(b, torch.stack(expected_b)) < 1e-5


@pytest.mark.parametrize(("name", "precision"), [("qwen2", "int8"), ("opt", "int8-weight"), ("gemma3_text", "int8")])
def test_quantized_gradients_are_those_of_the_rounded_layers(
    architectures: Architectures, name: str, precision: Precision
) -> None:
    """Against autograd on the rounded weights in float: what is left is the rounding of activations and gradients."""
    case = make_case(architectures, name, applicable(name), 4, 0)
    buffers = quantized_layer(case.weights, precision)
    dequantized_weights = {
        weight: dequantize(tensor, buffers[weight + SCALE]) if weight + SCALE in buffers else tensor
        for weight, tensor in buffers.items()
        if not weight.endswith(SCALE)
    }
    expected_hidden, expected_b = dataclasses.replace(case, weights=dequantized_weights).expected()
    layer = ReverseLayer(dataclasses.replace(case.shape, precision=precision), buffers, case.scaled_a)
    scales = torch.cat([buffers[target + SCALE] for target in case.shape.facts.linears])
    hidden, b = layer.reverse(case.inputs[0], *layer(*case.inputs)[1:], case.gradient, *case.inputs[1:], scales)
    for actual, expected in ((hidden, expected_hidden), (b, torch.stack(expected_b))):
        assert relative(actual, expected) < ROUNDING[precision]
