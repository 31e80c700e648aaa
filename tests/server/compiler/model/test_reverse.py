"""A decoder layer's reverse pass against autograd on the forward layer, for every architecture and target."""

import dataclasses

import pytest
import torch

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.model.decoder import DecoderLayer, LayerShape, all_tables, quantized_layer
from server.compiler.model.reverse import ReverseLayer
from server.compiler.model.rounding import SCALE, dequantize
from shared.recipe import TARGETS, Target

ROWS, LENGTH = 3, 11
# Relative. In layers of 32 features; forward, int8 rounds activations too, which turns some of a rectifier's on or off.
ROUNDING = {"int8": 0.2, "int8-weight": 0.05}


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer of a base, random inputs for it, and a random gradient of its output."""

    shape: LayerShape
    weights: dict[str, torch.Tensor]
    scaled_a: dict[Target, torch.Tensor]
    inputs: tuple[torch.Tensor, ...]  # as DecoderLayer takes them
    gradient: torch.Tensor

    def expected(self):
        """By autograd, in float64: the input's gradient, and B's of each example (slab,)."""
        double = [tensor.double() for tensor in self.inputs]
        hidden = double[0].requires_grad_()
        gradients = []
        for row in range(self.shape.rows):
            shape = dataclasses.replace(self.shape, rows=1)
            layer = DecoderLayer(shape, self.weights, self.scaled_a).double()
            slab = [double[1].detach().clone().requires_grad_()] if self.shape.targets else []
            others = [each[row : row + 1] if len(each) == self.shape.rows else each for each in double[1 + len(slab) :]]
            output = layer(hidden[row : row + 1], *slab, *others)
            output.backward(self.gradient[row : row + 1].double())
            gradients += [each.grad[0] for each in slab]
        assert hidden.grad is not None
        return hidden.grad, gradients


def make_case(architectures, name, targets, rank, index):
    checkpoint = load_checkpoint(str(architectures.base(name).directory))
    facts, generator = checkpoint.facts.of_layer(index), torch.Generator().manual_seed(rank)
    shape = LayerShape(facts, "fp32", paths=1, rows=ROWS, rank=rank, targets=targets)
    scaled_a = {target: torch.randn(rank, facts.features(target)[0], generator=generator) for target in targets}
    hidden, gradient = torch.randn(2, ROWS, LENGTH, facts.hidden, generator=generator)
    slab = (0.2 * torch.randn(1, shape.slab, generator=generator),) if targets else ()
    count, rows = len(facts.layer_norms), checkpoint.facts.mixer_rows
    vectors = [checkpoint.norms[count * index + at] for at in range(count)]
    if checkpoint.head_norms is not None:
        vectors += [checkpoint.head_norms[rows * index + at] for at in range(len(facts.mixer_vectors))]
    tables = all_tables(checkpoint.facts, LENGTH)[checkpoint.facts.kind(index)](LENGTH, ROWS)
    inputs = (hidden, *slab, *vectors, *tables)
    return Case(shape, checkpoint.layers[index], scaled_a, inputs, gradient)


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def applicable(name):
    return tuple(target for target in TARGETS if name != "opt" or target != "gate_proj")


@pytest.mark.parametrize(
    ("name", "precision"), [("qwen2", "int8"), ("opt", "int8-weight"), ("gemma3_text", "int8"), ("lfm2", "int8")]
)
def test_quantized_gradients_are_those_of_the_rounded_layers(architectures, name, precision):
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
