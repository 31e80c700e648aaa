"""Parts of a step alone: its matrix products, its directions and update, and a layer's reverse pass.

The reverse pass of estimator `gradient` is timed by turns against the forward pass: the last layer of SmolLM2-135M with
all seven linear layers adapted, on 16 rows of 64 tokens, lowered as in programs.
"""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from torch import Tensor, nn
from torch.export import export
from torch.nn import functional

from bench.programs import Methods, smollm2_recipe
from bench.runner import ratio, time_by_turns
from server.compiler.checkpoints.checkpoint import Checkpoint
from server.compiler.export.backends.xnnpack import lower_layers
from server.compiler.export.emission import Signature, emit
from server.compiler.export.gradient_network import GradientNetwork
from server.compiler.export.network import QuantizedBase, layer_example
from server.compiler.export.weights import StoredKeys
from server.compiler.methods.estimators import state_of
from shared.recipe import TARGETS, Precision, Recipe
from shared.zo.lora import BaseShape, flat_size


class LayerGemms(nn.Module):
    """The matrix products of one decoder layer, on activations of the right shapes."""

    def __init__(self, recipe: Recipe, shape: BaseShape) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for target in TARGETS:
            in_features, out_features = shape.features(target)
            self.register_buffer(target, torch.rand(out_features, in_features, generator=generator))
            if target in recipe.targets:
                self.register_buffer(f"{target}_a", torch.rand(recipe.rank, in_features, generator=generator))
        self.targets, self.paths, self.rank = recipe.targets, recipe.paths, recipe.rank

    def forward(self, hidden: Tensor, wide: Tensor, q: Tensor, k: Tensor, v: Tensor, *b: Tensor) -> tuple[Tensor, ...]:
        """hidden (R, S, hidden), wide (R, S, intermediate), q (R*KV, G*S, d), k (R*KV, d, S), v (R*KV, S, d)."""
        scores = torch.bmm(q, k)
        outputs = [_first_element(scores), _first_element(torch.bmm(scores, v))]
        factors = iter(b)
        for target in TARGETS:
            weight = getattr(self, target)
            x = wide if target == "down_proj" else hidden
            outputs.append(_first_element(functional.linear(x, weight)))
            if target in self.targets:
                low = functional.linear(x, getattr(self, f"{target}_a"))
                outputs.append(_first_element(torch.bmm(low.view(self.paths, -1, self.rank), next(factors))))
        return tuple(outputs)


def _first_element(product: Tensor) -> Tensor:
    """One element of each matrix (N, rows, columns), so that every product is computed and none is copied."""
    return product[:, :1, :1] + 0.0


class NoiseAndUpdate(nn.Module):
    """A step without the network: directions, perturbed copies of B, the update."""

    def __init__(self, recipe: Recipe, size: int) -> None:
        super().__init__()
        self.state: Any = state_of(recipe, size)

    def forward(self, seeds: Tensor, coefficients: Tensor, eps: Tensor) -> Tensor:
        """Returns one element of every path's B, so that all are computed."""
        paths, z = self.state.perturb(seeds, eps)
        self.state.update(z, coefficients, eps)
        return paths[:, :1] + 0.0


def gemm_example(recipe: Recipe, shape: BaseShape) -> tuple[Tensor, ...]:
    """Returns activations of a step's shapes for `LayerGemms`."""
    rows, length = recipe.score_rows, recipe.sequence_length
    groups = shape.heads // shape.kv_heads
    k = torch.rand(rows * shape.kv_heads, shape.head_dim, length)
    return (
        torch.rand(rows, length, shape.hidden),
        torch.rand(rows, length, shape.intermediate),
        torch.rand(rows * shape.kv_heads, groups * length, shape.head_dim),
        k,
        k.transpose(1, 2).contiguous(),
        *(torch.rand(recipe.paths, recipe.rank, shape.features(target)[1]) for target in recipe.targets),
    )


def gemm_seconds(recipe: Recipe, shape: BaseShape, rounds: int) -> list[float]:
    """Returns the seconds of one layer's matrix products in XNNPACK, once per round."""
    example = gemm_example(recipe, shape)
    exported = export(LayerGemms(recipe, shape), example, strict=False)
    lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "gemms.pte"
        path.write_bytes(lowered.buffer)
        program, inputs = Methods(path, None, ["forward"]), [tensor.numpy() for tensor in example]
        return time_by_turns(rounds, {"gemms": lambda _number: program("forward", *inputs)})["gemms"]


def noise_update_seconds(recipe: Recipe, shape: BaseShape, rounds: int) -> list[float]:
    """Returns the seconds of directions, perturbation and update, once per round."""
    queries = recipe.queries
    example = (torch.zeros((queries, 2), dtype=torch.int32), torch.ones(queries), torch.ones(1))
    module = NoiseAndUpdate(recipe, flat_size(recipe, shape))
    return _time_methods({"adapter": Signature(module, example)}, rounds)["adapter"]


def _time_methods(methods: Mapping[str, Signature], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each method of a program, by turns. The emitter asks for a method `adapter`."""
    inputs = {name: [tensor.numpy() for tensor in signature.example] for name, signature in methods.items()}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "parts.pte"
        emit(methods, set(), path)
        program = Methods(path, None, list(methods))

        def call(name: str) -> Callable[[int], object]:
            return lambda _number: program(name, *inputs[name])

        return time_by_turns(rounds, {name: call(name) for name in methods})


REVERSE_ROWS, REVERSE_LENGTH, REVERSE_RANK = 16, 64, 8


class OneLayer(nn.Module):
    """A lowered layer as a whole method."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the layer."""
        outputs: Tensor | tuple[Tensor, Tensor] = self.layer(*inputs)
        return outputs


def reverse_over_forward(
    checkpoint: Checkpoint, precision: Precision, rounds: int, length: int = REVERSE_LENGTH
) -> float:
    """Returns the median ratio of a reverse pass's seconds to a forward pass's. checkpoint: of SmolLM2-135M."""
    recipe = smollm2_recipe(
        estimator="gradient",
        precision=precision,
        layers="last:1",
        targets=TARGETS,
        rank=REVERSE_RANK,
        effective_batch=REVERSE_ROWS,
        sequence_length=length,
    )
    network = GradientNetwork(
        recipe, QuantizedBase.of(checkpoint, precision), partial(lower_layers, stored=StoredKeys())
    )
    stack = network.stack(REVERSE_ROWS, 1, slice(checkpoint.facts.layers - 1, None))
    (shape,), (forward,), (_, (reverse,)) = stack.shapes, stack.layers, network.reverses(stack)
    states = torch.randn(2, REVERSE_ROWS, length, shape.facts.hidden, generator=torch.Generator().manual_seed(0))
    layer_inputs, scales = layer_example(shape, length)[1:], network.scales(stack)
    scale_inputs = () if scales is None else (scales[0],)
    methods = {
        "adapter": Signature(OneLayer(forward), (states[0], *layer_inputs)),  # the forward pass
        "reverse": Signature(OneLayer(reverse), (states[0], states[1], *layer_inputs, *scale_inputs)),
    }
    seconds = _time_methods(methods, rounds)
    return ratio(seconds["reverse"], seconds["adapter"])
