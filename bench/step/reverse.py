"""A decoder layer's reverse pass against its forward pass, timed by turns: estimator `gradient` on XNNPACK.

The last layer of SmolLM2-135M with all seven linear layers adapted, on 16 rows of 64 tokens, lowered as in programs.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.programs import Methods, smollm2_recipe
from bench.timing import by_turns, ratio
from server.compiler.checkpoints.checkpoint import Checkpoint
from server.compiler.export.backends.xnnpack import lower_layers
from server.compiler.export.emission import Signature, emit
from server.compiler.export.gradient_network import GradientNetwork
from server.compiler.export.network import QuantizedBase, layer_example
from server.compiler.export.weights import StoredKeys
from shared.recipe import TARGETS, Precision

ROWS, LENGTH, RANK = 16, 64, 8


class OneLayer(nn.Module):
    """A lowered layer as a whole method."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the layer."""
        found: Tensor | tuple[Tensor, Tensor] = self.layer(*inputs)
        return found


def reverse_over_forward(checkpoint: Checkpoint, precision: Precision, rounds: int, length: int = LENGTH) -> float:
    """Returns the median ratio of a reverse pass's seconds to a forward pass's. checkpoint: of SmolLM2-135M."""
    recipe = smollm2_recipe(
        estimator="gradient",
        precision=precision,
        layers="last:1",
        targets=TARGETS,
        rank=RANK,
        effective_batch=ROWS,
        sequence_length=length,
    )
    network = GradientNetwork(
        recipe, QuantizedBase.of(checkpoint, precision), partial(lower_layers, stored=StoredKeys())
    )
    last = network.stack(ROWS, 1, slice(checkpoint.facts.layers - 1, None))
    (shape,), (forward,), (_, (reverse,)) = last.shapes, last.layers, network.reverses(last)
    states = torch.randn(2, ROWS, length, shape.facts.hidden, generator=torch.Generator().manual_seed(0))
    others, scales = layer_example(shape, length)[1:], network.scales(last)
    returned = () if scales is None else (scales[0],)
    # The emitter asks for a method `adapter`: here it is the forward pass.
    methods = {
        "adapter": Signature(OneLayer(forward), (states[0], *others)),
        "reverse": Signature(OneLayer(reverse), (states[0], states[1], *others, *returned)),
    }
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "layer.pte"
        emit(methods, set(), path)
        program = Methods(path, None, list(methods))
        inputs = {method: [each.numpy() for each in signature.example] for method, signature in methods.items()}
        seconds = by_turns(rounds, {name: lambda _number, name=name: program(name, *inputs[name]) for name in methods})
    return ratio(seconds["reverse"], seconds["adapter"])
