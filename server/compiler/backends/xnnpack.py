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
from executorch.backends.xnnpack.utils.quant_utils import is_dequant, is_dynamic_qdq, tag_as_implicit_q_dq
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir import EdgeCompileConfig, to_edge
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch import Tensor, nn
from torch.export import ExportedProgram, export

from server.compiler.backends.portable import Portable
from server.compiler.quantization import SCHEMES, Scheme, stored_bytes, stored_key
from shared.errors import CompileFailed
from shared.program import Role
from shared.recipe import Precision

Example = tuple[Tensor, ...]


class Xnnpack(Portable):
    """Layers as XNNPACK delegates, in every precision."""

    precisions: frozenset[Precision] = frozenset({"fp32", *SCHEMES})
    files: Mapping[Role, str] = {**Portable.files, "inference": "inference.pte"}

    def lower(
        self, layers: Sequence[nn.Module], example: Example, scheme: Scheme | None, stored: set[str]
    ) -> list[nn.Module]:
        """One delegate per layer; see `Backend.lower`."""
        return lower_layers(layers, example, scheme, stored)


class StandIn(nn.Module):
    """A layer's inputs and output without its arithmetic: what tracing a method through a delegate needs to know."""

    def __init__(self, width: int) -> None:
        """width: of the output's last dimension; the others are the first input's."""
        super().__init__()
        self.width = width

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Of the layer's shape."""
        if hidden.shape[-1] == self.width:
            return hidden + 0.0
        return hidden[..., :1].repeat(*(1 for _ in hidden.shape[:-1]), self.width)


def lower_layers(
    layers: Sequence[nn.Module],
    example: Example,
    scheme: Scheme | None,
    stored: set[str],
    kind: type[BackendDetails] = XnnpackBackend,
) -> list[nn.Module]:
    """One delegate per layer.

    layers: equal but for their persistent buffers, whose integers `scheme` says how to store. stored: keys that the
    `.ptd` holds. kind: who runs them; it must name constants as XNNPACK does.
    """
    template = _template(layers[0], scheme)
    width = layers[0](*example).shape[-1]
    program = edge_program(template, example)
    _mark_quantized_activations(program)
    result = kind.preprocess(program, [])
    keys = _keys(template, scheme)
    _check_named(keys, result.processed_bytes, kind)
    constants = {
        key: result.data_store_output.buffers[entry.buffer_index]
        for key, entry in result.data_store_output.pte_data.items()
        if key not in keys.values()
    }
    stand_in = export(StandIn(width), example, strict=False)
    payload = result.processed_bytes
    return [_delegate(kind, stand_in, payload, keys, constants, layer, scheme, stored) for layer in layers]


def _keys(layer: nn.Module, scheme: Scheme | None) -> dict[str, str]:
    return {name: stored_key(name, tensor, scheme) for name, tensor in layer.state_dict().items()}


def _template(layer: nn.Module, scheme: Scheme | None) -> nn.Module:
    """A copy of `layer` whose persistent buffers all differ, so that each has a key of its own."""
    template = copy.deepcopy(layer)
    generator = torch.Generator().manual_seed(0)
    for tensor in template.state_dict().values():
        if tensor.dtype == torch.int8 and scheme is not None:
            largest = scheme.largest
            tensor.copy_(torch.randint(-largest, largest + 1, tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return template


def edge_program(module: nn.Module, example: Example) -> ExportedProgram:
    """A layer's graph as backends take it."""
    exported = export(module, example, strict=False)
    # Linear layers stay whole: as matrix products they would be reshaped to a fixed number of tokens.
    config = EdgeCompileConfig(_check_ir_validity=False, preserve_ops=[torch.ops.aten.linear.default])
    return to_edge(exported, compile_config=config).exported_program()


def _mark_quantized_activations(program: ExportedProgram) -> None:
    """As XNNPACK's partitioner does: a linear layer takes them as they are. Unmarked, it could have no bias."""
    for node in program.graph.nodes:
        if is_dequant(node) and is_dynamic_qdq(node):
            tag_as_implicit_q_dq(node)


def _check_named(keys: Mapping[str, str], payload: bytes, kind: type[BackendDetails]) -> None:
    if absent := [name for name, key in keys.items() if payload.count(key.encode()) != 1]:
        raise CompileFailed(
            f"{kind.__name__} did not store {', '.join(absent)} as given; this ExecuTorch is not supported"
        )


def _delegate(
    kind: type[BackendDetails],
    stand_in: ExportedProgram,
    payload: bytes,
    keys: Mapping[str, str],
    constants: Mapping[str, bytes],
    layer: nn.Module,
    scheme: Scheme | None,
    stored: set[str],
) -> LoweredBackendModule:
    """The template's delegate with the layer's tensors in place of the template's, which are known by `keys`."""
    data = NamedDataStore()
    for key, constant in constants.items():
        data.add_named_data(key, constant, alignment=16)
    for name, tensor in layer.state_dict().items():
        own = stored_key(name, tensor, scheme)
        payload = payload.replace(keys[name].encode(), own.encode())
        if own not in stored:
            data.add_named_data(own, stored_bytes(name, tensor, scheme), alignment=16)
    module = LoweredBackendModule(
        edge_program=stand_in,
        backend_id=kind.__name__,
        processed_bytes=payload,
        compile_specs=[],
        named_data_store_output=data.get_named_data_store_output(),
    )
    module.meta = {"debug_handle_map": {}}
    return module
