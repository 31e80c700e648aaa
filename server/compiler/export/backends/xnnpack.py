"""Decoder layers as XNNPACK delegates: the graph is lowered once, and every layer's constants are then named in it.

XNNPACK names a delegate's constants by the sha256 of their bytes. All layers of a shape share one graph, so a template
layer with distinct random weights is lowered, and the delegate of a layer is the template's delegate with the keys of
its own weights. That takes seconds, whereas lowering each layer takes minutes. Constants in the `.ptd` are omitted from
the `.pte`; the others (A) are included. What a template was lowered to is kept for later compilations (`LoweredFiles`).
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from executorch.backends.xnnpack._passes import XNNPACKPassManager, XNNPACKRemoveCloneOpsTransform
from executorch.backends.xnnpack._passes.decompose_cat import DecomposeConcatenate
from executorch.backends.xnnpack._passes.fuse_activation_pass import FuseActivationPass
from executorch.backends.xnnpack.utils.quant_utils import is_dequant, is_dynamic_qdq, tag_as_implicit_q_dq
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.passes.const_prop_pass import ConstPropPass
from torch import Tensor, nn
from torch.export import ExportedProgram, export

from server.compiler.export.backends import Backend
from server.compiler.export.emission import edge_program
from server.compiler.export.lowered_files import LoweredFiles, LoweredGraph, graph_name
from server.compiler.export.lowering import Example, LayerGroup, at_once
from server.compiler.export.weights import StoredKeys
from server.compiler.model.quantization import stored_bytes, stored_key
from server.compiler.model.rounding import SCHEMES, Scheme
from shared.canonical import file_sha256
from shared.errors import CompileFailed
from shared.program import Role
from shared.recipe import Precision

NEEDED_PASSES = (XNNPACKRemoveCloneOpsTransform, ConstPropPass, FuseActivationPass, DecomposeConcatenate)


class Xnnpack(Backend):
    """Lowers layers to XNNPACK delegates, in every precision."""

    precisions: frozenset[Precision] = frozenset({"fp32", *SCHEMES})
    files: Mapping[Role, str] = {**Backend.files, "inference": "inference.pte"}

    def lower(self, groups: Sequence[LayerGroup], stored: StoredKeys, kept: LoweredFiles) -> list[list[nn.Module]]:
        """Returns one delegate per layer; see `Backend.lower`."""
        return lower_layers(groups, stored, kept)


class StandIn(nn.Module):
    """A stand-in with a layer's input and output shapes but without its arithmetic, to trace through a delegate.

    An output has all dimensions but the last of one of the first two inputs, hidden states both in a layer with picks,
    or, of two dimensions, the first one alone.
    """

    def __init__(self, sizes: Sequence[torch.Size], example: Example) -> None:
        """sizes: of the layer's outputs. example: its inputs."""
        super().__init__()
        self.forms = [(size, int(example[0].shape[:-1] != size[:-1] == example[1].shape[:-1])) for size in sizes]

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Returns tensors of the layer's output shapes."""
        outputs = tuple(self._output(inputs[source], len(size), int(size[-1])) for size, source in self.forms)
        return outputs if len(outputs) > 1 else outputs[0]

    def _output(self, states: Tensor, dimensions: int, width: int) -> Tensor:
        leading = states.shape[:-1] if dimensions == states.dim() else states.shape[:1]
        return states.new_empty((*leading, width), dtype=torch.float32)


class Outline(ExportedProgram):
    """The graph of a stand-in, whose module is the stand-in: a pass traces it at every call of every delegate."""

    def __init__(self, stand_in: nn.Module, example: Example) -> None:
        traced = export(stand_in, example, strict=False)
        super().__init__(
            root=traced.graph_module,
            graph=traced.graph,
            graph_signature=traced.graph_signature,
            state_dict=traced.state_dict,
            range_constraints=traced.range_constraints,
            module_call_graph=traced.module_call_graph,
            example_inputs=traced.example_inputs,
            constants=traced.constants,
            verifiers=traced.verifiers,
        )
        self._stand_in = stand_in

    def module(self, check_guards: bool = True) -> nn.Module:
        """See the base class."""
        return self._stand_in


def lower_layers(
    groups: Sequence[LayerGroup], stored: StoredKeys, kept: LoweredFiles, kind: type[BackendDetails] = XnnpackBackend
) -> list[list[nn.Module]]:
    """Returns one delegate per layer of each group.

    stored: keys in the `.ptd`. kept: graphs that were lowered before. kind: the partitioner; it must name constants as
    XNNPACK does.
    """
    delegates: list[list[nn.Module]] = []
    graphs = at_once([partial(_lower, group, kind, kept) for group in groups])
    for group, graph in zip(groups, graphs, strict=True):
        outline = Outline(StandIn([torch.Size(size) for size in graph.sizes], group.example), group.example)
        delegates.append([_delegate(graph, kind, outline, layer, group.scheme, stored) for layer in group.layers])
    return delegates


def _lower(group: LayerGroup, kind: type[BackendDetails], kept: LoweredFiles) -> LoweredGraph:
    """Lowers a group's graph. Raises CompileFailed if the payload does not name the layer's tensors."""
    template = _template(group.layers[0], group.scheme)
    exported = export(template, group.example, strict=False)
    name = graph_name(exported, (kind.__name__, repr(group.scheme), _own_source()))
    graph = kept.read(name)
    if graph is not None:
        return graph
    program = edge_program(exported)
    result = preprocess(mark_linear_layers(program)) if kind is XnnpackBackend else kind.preprocess(program, [])
    keys = {name: stored_key(name, tensor, group.scheme) for name, tensor in template.state_dict().items()}
    if absent := [name for name, key in keys.items() if result.processed_bytes.count(key.encode()) != 1]:
        raise CompileFailed(
            f"{kind.__name__} did not store {', '.join(absent)} as given; this ExecuTorch is not supported"
        )
    constants = {
        key: bytes(result.data_store_output.buffers[entry.buffer_index])
        for key, entry in result.data_store_output.pte_data.items()
        if key not in keys.values()
    }
    sizes = [output.shape for output in outputs(program)]
    graph = LoweredGraph(bytes(result.processed_bytes), keys, constants, sizes)
    kept.write(name, graph)
    return graph


@cache
def _own_source() -> str:
    """The digest of this module, whose passes decide what a graph is lowered to."""
    return file_sha256(Path(__file__))


def _delegate(
    graph: LoweredGraph,
    kind: type[BackendDetails],
    outline: Outline,
    layer: nn.Module,
    scheme: Scheme | None,
    stored: StoredKeys,
) -> LoweredBackendModule:
    """Returns the template's delegate with the layer's tensors."""
    data, payload = NamedDataStore(), graph.payload
    for key, constant in graph.constants.items():
        data.add_named_data(key, constant, alignment=16)
    for name, tensor in layer.state_dict().items():
        layer_key = stored.key(name, tensor, scheme)
        payload = payload.replace(graph.keys[name].encode(), layer_key.encode())
        if layer_key not in stored:
            data.add_named_data(layer_key, stored_bytes(name, tensor, scheme), alignment=16)
    module = LoweredBackendModule(
        edge_program=outline,
        backend_id=kind.__name__,
        processed_bytes=payload,
        compile_specs=[],
        named_data_store_output=data.get_named_data_store_output(),
    )
    module.meta = {"debug_handle_map": {}}
    return module


def preprocess(program: ExportedProgram) -> PreprocessResult:
    """Returns what `XnnpackBackend.preprocess` does, with those of its passes that change a layer of ours.

    Each pass traces the whole graph again, so that all of them take half of a lowering's time.
    """
    needed = XNNPACKPassManager(program, list(NEEDED_PASSES)).transform()
    # With this option it runs one pass of its own, for linear layers that are not whole yet.
    result: PreprocessResult = XnnpackBackend.preprocess(needed, [CompileSpec("dqlinear_partitioner", b"")])
    return result


def _template(layer: nn.Module, scheme: Scheme | None) -> nn.Module:
    """Returns a copy of `layer` with distinct values in all persistent buffers, so that each has its own key."""
    template = copy.deepcopy(layer, {id(buffer): buffer for buffer in layer.buffers()})  # without their values
    generator = torch.Generator().manual_seed(0)
    for name, tensor in layer.state_dict().items():
        holder, _, attribute = name.rpartition(".")
        values = torch.empty_like(tensor)  # one for each name: a buffer may be registered under two
        if tensor.dtype == torch.int8 and scheme is not None:
            values.random_(-scheme.largest, scheme.largest + 1, generator=generator)
        else:
            values.uniform_(generator=generator)
        setattr(template.get_submodule(holder), attribute, values)
    return template


def outputs(program: ExportedProgram) -> list[Tensor]:
    """Returns the outputs of a graph as tensors without values."""
    return [node.meta["val"] for node in program.graph.output_node().args[0]]


def mark_linear_layers(program: ExportedProgram) -> ExportedProgram:
    """Marks quantized inputs as XNNPACK's partitioner does: linear layers are then lowered whole, with their bias."""
    for node in program.graph.nodes:
        if is_dequant(node) and is_dynamic_qdq(node):
            tag_as_implicit_q_dq(node)
    return program
