"""Decoder layers as XNNPACK delegates: the graph is lowered once, then given every layer's data by name.

XNNPACK names a delegate's constants by the sha256 of their bytes. All layers of a model are one graph, so a template
layer with distinct random weights is lowered, and a layer's delegate is the template's with the keys of its own
weights written over the template's. That takes seconds where lowering each layer takes minutes.
Data that the `.ptd` holds is left out; the rest (A) goes into the `.pte`.
Knows nothing of recipes or checkpoints' forms.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from executorch.backends.xnnpack.utils.configs import get_xnnpack_edge_compile_config
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir import to_edge
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch import Tensor, nn
from torch.export import ExportedProgram, export

from server.compiler.weights import content_key, tensor_bytes
from shared.errors import CompileFailed

Example = tuple[Tensor, ...]


class StandIn(nn.Module):
    """A layer's inputs and output without its arithmetic: what tracing a method through a delegate needs to know."""

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Of the layer's shape."""
        return hidden + 0.0


def lower_layers(layers: Sequence[nn.Module], example: Example, stored: set[str]) -> list[nn.Module]:
    """One XNNPACK delegate per layer. layers: equal but for their persistent buffers; stored: keys the `.ptd` holds."""
    template = _template(layers[0])
    result = XnnpackBackend.preprocess(_edge_program(template, example), [])
    keys = {name: content_key(tensor) for name, tensor in template.state_dict().items()}
    _check_named(keys, result.processed_bytes)
    constants = {
        key: result.data_store_output.buffers[entry.buffer_index]
        for key, entry in result.data_store_output.pte_data.items()
        if key not in keys.values()
    }
    stand_in = _edge_program(StandIn(), example)
    return [
        _delegate(stand_in, result.processed_bytes, keys, constants, layer.state_dict(), stored) for layer in layers
    ]


def _template(layer: nn.Module) -> nn.Module:
    """A copy of `layer` whose persistent buffers all differ, so that each has a key of its own."""
    template = copy.deepcopy(layer)
    generator = torch.Generator().manual_seed(0)
    for tensor in template.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return template


def _edge_program(module: nn.Module, example: Example) -> ExportedProgram:
    exported = export(module, example, strict=False)
    return to_edge(exported, compile_config=get_xnnpack_edge_compile_config()).exported_program()


def _check_named(keys: Mapping[str, str], payload: bytes) -> None:
    if absent := [name for name, key in keys.items() if payload.count(key.encode()) != 1]:
        raise CompileFailed(f"XNNPACK did not store {', '.join(absent)} as given; this ExecuTorch is not supported")


def _delegate(
    stand_in: ExportedProgram,
    payload: bytes,
    keys: Mapping[str, str],
    constants: Mapping[str, bytes],
    tensors: Mapping[str, Tensor],
    stored: set[str],
) -> LoweredBackendModule:
    """The template's delegate with `tensors` in place of the template's, which are known by `keys`."""
    data = NamedDataStore()
    for key, constant in constants.items():
        data.add_named_data(key, constant, alignment=16)
    for name, key in keys.items():
        own = content_key(tensors[name])
        payload = payload.replace(key.encode(), own.encode())
        if own not in stored:
            data.add_named_data(own, tensor_bytes(tensors[name]), alignment=16)
    module = LoweredBackendModule(
        edge_program=stand_in,
        backend_id=XnnpackBackend.__name__,
        processed_bytes=payload,
        compile_specs=[],
        named_data_store_output=data.get_named_data_store_output(),
    )
    module.meta = {"debug_handle_map": {}}
    return module
