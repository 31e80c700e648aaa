"""What a step cannot be faster than: its matrix products alone, and its weights read once from memory."""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.runtime import Methods
from server.compiler.emission import Signature, emit
from server.compiler.estimators import state_of
from shared.lora import BaseShape, flat_size
from shared.recipe import TARGETS, Recipe


class LayerGemms(nn.Module):
    """The matrix products of one decoder layer on activations of the right shapes, and nothing else."""

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
        outputs = [_corner(scores), _corner(torch.bmm(scores, v))]
        factors = iter(b)
        for target in TARGETS:
            weight = getattr(self, target)
            x = wide if target == "down_proj" else hidden
            outputs.append(_corner(functional.linear(x, weight)))
            if target in self.targets:
                low = functional.linear(x, getattr(self, f"{target}_a"))
                outputs.append(_corner(torch.bmm(low.view(self.paths, -1, self.rank), next(factors))))
        return tuple(outputs)


def _corner(product: Tensor) -> Tensor:
    """One element of each matrix (N, rows, columns), so that no product is left out and none is copied out."""
    return product[:, :1, :1] + 0.0


class NoiseAndUpdate(nn.Module):
    """What a step does besides the network: directions, perturbed copies of B, the update."""

    def __init__(self, recipe: Recipe, size: int) -> None:
        super().__init__()
        self.state = state_of(recipe, size)

    def forward(self, seeds: Tensor, coefficients: Tensor, eps: Tensor) -> Tensor:
        """Returns one element of every path's B, so that none is left out."""
        paths, z = self.state.perturb(seeds, eps)
        self.state.update(z, coefficients, eps)
        return paths[:, :1] + 0.0


def gemm_example(recipe: Recipe, shape: BaseShape) -> tuple[Tensor, ...]:
    """Activations of a step's shapes, as `LayerGemms` takes them."""
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
    """Seconds that one layer's matrix products take in XNNPACK, once a round."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from torch.export import export

    example = gemm_example(recipe, shape)
    program = to_edge_transform_and_lower(
        export(LayerGemms(recipe, shape), example, strict=False), partitioner=[XnnpackPartitioner()]
    ).to_executorch()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "gemms.pte"
        path.write_bytes(program.buffer)
        methods = Methods(path, None, ["forward"])
        return _timed(methods, "forward", [tensor.numpy() for tensor in example], rounds)


@torch.no_grad()
def torch_gemm_seconds(recipe: Recipe, shape: BaseShape, rounds: int) -> list[float]:
    """Seconds that the same matrix products take in PyTorch on the CPU, once a round."""
    module, example = LayerGemms(recipe, shape), gemm_example(recipe, shape)
    return _timed(lambda _, *inputs: module(*inputs), "forward", example, rounds)


def noise_update_seconds(recipe: Recipe, shape: BaseShape, rounds: int) -> list[float]:
    """Seconds that directions, perturbation and update take, once a round."""
    queries = recipe.queries
    example = (torch.zeros((queries, 2), dtype=torch.int32), torch.ones(queries), torch.ones(1))
    module = NoiseAndUpdate(recipe, flat_size(recipe, shape))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "noise.pte"
        emit({"adapter": Signature(module, example)}, set(), path)
        return _timed(Methods(path, None, ["adapter"]), "adapter", [tensor.numpy() for tensor in example], rounds)


def read_bandwidth(rounds: int = 5) -> float:
    """Bytes per second at which all cores read memory that no cache holds."""
    block = np.ones(64 << 20, np.float32)  # 256 MiB
    tensor = torch.from_numpy(block)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        tensor.sum()
        seconds.append(time.perf_counter() - began)
    return float(block.nbytes / min(seconds))


def _timed(methods: Callable[..., Any], name: str, inputs: Sequence[Any], rounds: int) -> list[float]:
    methods(name, *inputs)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        methods(name, *inputs)
        seconds.append(time.perf_counter() - began)
    return seconds
