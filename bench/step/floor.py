"""The matrix products of a step alone, and the times of single methods."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from torch import Tensor, nn
from torch.export import export
from torch.nn import functional

from bench.programs import Methods
from bench.runner import time_by_turns
from server.compiler.export.emission import Signature, emit
from shared.recipe import TARGETS, Recipe
from shared.zo.lora import BaseShape


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


def time_methods(methods: Mapping[str, Signature], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each method of a program, by turns. The emitter asks for a method `adapter`."""
    inputs = {name: [tensor.numpy() for tensor in signature.example] for name, signature in methods.items()}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "parts.pte"
        emit(methods, set(), path)
        program = Methods(path, None, list(methods))

        def call(name: str) -> Callable[[int], object]:
            return lambda _number: program(name, *inputs[name])

        return time_by_turns(rounds, {name: call(name) for name in methods})
