"""`bench step --only reverse`: what exact gradients cost beside forward passes.

A layer's reverse pass is timed by turns against its forward pass: a layer of SmolLM2-135M with all seven linear layers
adapted, on 16 rows of 64 tokens, lowered as in programs. Of so few tokens all products are kept, so a reverse pass has
as many as a forward pass: the same with the weights transposed. Programs with and without exact gradients, equal
otherwise, are compiled by turns. Both descend without moments, which would be zeros in a program: 8 bytes for each
weight of B with Adam.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.programs import CompiledProgram, compile_cold, model_file, smollm2_recipe
from bench.result import Claims, Measurement, notes
from bench.runner import ratio
from bench.step.floor import time_methods
from server.compiler.checkpoints.checkpoint import Checkpoint, load_checkpoint
from server.compiler.export.backends.xnnpack import lower_layers
from server.compiler.export.emission import Signature
from server.compiler.export.gradient_network import GradientNetwork
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.network import QuantizedBase, layer_example
from server.compiler.export.weights import StoredKeys
from server.compiler.methods.training import Stack
from server.compiler.model.reverse import KeepingLayer, Kept
from shared.recipe import TARGETS, Precision

ROWS, LENGTH, RANK = 16, 64, 8  # of the timed layer
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
COMPILATIONS = 3  # of each program
PROGRAM: dict[str, Any] = {
    "layers": "last:12",
    "targets": TARGETS,
    "rank": 8,
    "effective_batch": 8,
    "sequence_length": 36,
    "precision": "int8",
}


def reverse(rounds: int) -> Measurement:
    """Returns no rows, and claims. rounds: timed turns of each comparison."""
    checkpoint = load_checkpoint(str(model_file()))
    claims: Claims = {}
    for precision in PRECISIONS:
        notes.print(f"reverse over forward, {precision}")
        last = LastLayer.of(checkpoint, precision)
        claims[f"reverse_over_forward_{precision}"] = reverse_over_forward(last, rounds)
    return [], claims | programs()


def programs() -> Claims:
    """Compiles the program `PROGRAM` with and without exact gradients, from cold, by turns."""
    recipes = {
        "forward": smollm2_recipe(estimator="replay", queries=1, **PROGRAM),
        "gradient": smollm2_recipe(estimator="gradient", optimizer="sgd", **PROGRAM),
    }
    compiled: dict[str, list[CompiledProgram]] = {name: [] for name in recipes}
    with tempfile.TemporaryDirectory() as root:
        for number in range(COMPILATIONS):
            for name, recipe in recipes.items():
                notes.print(f"compiling, {name}")
                compiled[name].append(compile_cold(recipe, Path(root) / f"{name}-{number}"))
    seconds = {name: [each.seconds for each in of_name] for name, of_name in compiled.items()}
    gradient, forward = compiled["gradient"][0], compiled["forward"][0]
    weights = {each.manifest.file("weights").sha256 for each in (gradient, forward)}
    return {
        "reverse_compile_ratio": ratio(seconds["gradient"], seconds["forward"]),
        "reverse_pte_bytes": gradient.size("program") - forward.size("program"),
        "reverse_changes_weights_file": float(len(weights) > 1),
    }


class OneLayer(nn.Module):
    """A lowered layer as a whole method."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Runs the layer."""
        outputs: Tensor | tuple[Tensor, ...] = self.layer(*inputs)
        return outputs


@dataclass(frozen=True)
class LastLayer:
    """The last layer of a base, its network, and the length of its sequences."""

    network: GradientNetwork
    stack: Stack
    length: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, precision: Precision, length: int = LENGTH) -> LastLayer:
        """Returns the layer with all its linear layers adapted, on `ROWS` rows."""
        recipe = smollm2_recipe(
            estimator="gradient",
            precision=precision,
            layers="last:1",
            targets=TARGETS,
            rank=RANK,
            effective_batch=ROWS,
            sequence_length=length,
        )
        base = QuantizedBase.of(checkpoint, precision)
        network = GradientNetwork(recipe, base, partial(lower_layers, stored=StoredKeys(), kept=LoweredFiles()))
        return cls(network, network.stack(ROWS, 1, slice(checkpoint.facts.layers - 1, None), kind=KeepingLayer), length)


def reverse_over_forward(last: LastLayer, rounds: int) -> float:
    """Returns the median ratio of a reverse pass's seconds to a forward pass's."""
    (shape,), (forward,), (_, (backward,)) = last.stack.shapes, last.stack.layers, last.network.reverses(last.stack)
    states = torch.randn(2, ROWS, last.length, shape.facts.hidden, generator=torch.Generator().manual_seed(0))
    layer_inputs, scales = layer_example(shape, last.length)[1:], last.network.scales(last.stack)
    scale_inputs = () if scales is None else (scales[0],)
    kept = [torch.randn(*states[0].shape[:2], width) for width in Kept.widths(shape)]
    methods = {
        "adapter": Signature(OneLayer(forward), (states[0], *layer_inputs)),  # the forward pass
        "reverse": Signature(OneLayer(backward), (states[0], *kept, states[1], *layer_inputs, *scale_inputs)),
    }
    seconds = time_methods(methods, rounds)
    return ratio(seconds["reverse"], seconds["adapter"])
