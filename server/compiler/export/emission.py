"""Emits exported methods as one multi-method `.pte` whose methods share flat B."""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig, memory
from executorch.exir._serialize._serialize import serialize_for_executorch
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.passes import (
    DebugHandleGeneratorPass,
    MemoryFormatOpsPass,
    MemoryPlanningPass,
    OpReplacePass,
    ScalarToTensorPass,
    SymToTensorPass,
    dead_code_elimination_pass,
)
from executorch.exir.passes.normalize_transpose_pass import NormalizeTransposePass
from executorch.exir.passes.remove_graph_asserts_pass import RemoveNonCoreAtenOpGraphAssertsPass
from executorch.exir.passes.remove_mixed_type_operators import RemoveMixedTypeOperators
from executorch.exir.passes.replace_broken_ops_with_function_ops_pass import ReplaceBrokenOpsWithFunctionalOpsPass
from executorch.exir.program._program import _transform, lift_constant_tensor_pass
from executorch.exir.schema import BackendDelegate, DelegateCall, ExecutionPlan
from executorch.exir.tracer import _default_decomposition_table
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils._pytree import tree_map

from server.compiler.methods.estimators import STATE
from shared.errors import CompileFailed

EXTERNAL = "weights"  # tag of the constants in the .ptd
# Linear layers are not decomposed: as matrix products they would be reshaped to a fixed number of tokens.
WHOLE = (torch.ops.aten.linear.default,)
INITIALIZER = "adapter"  # the method that must be loaded before any other method is called


@dataclass(frozen=True)
class Signature:
    """A method to export: its module, example inputs and dynamic dimensions."""

    module: nn.Module
    example: tuple[Tensor, ...]
    dynamic: Mapping[int, Mapping[int, Dim]] = field(default_factory=dict)  # by input, then by dimension

    def export(self) -> ExportedProgram:
        """Exports the module's graph. Raises CompileFailed if the graph is specialized to the example's lengths."""
        if not self.dynamic:
            return export(self.module, self.example, strict=False)
        # Hints instead of named dimensions: views of matrix products create conditions that always hold but that the
        # exporter cannot prove, and it requires a proof for named dimensions.
        shapes = [
            {axis: Dim.AUTO(min=dim.min, max=dim.max) for axis, dim in self.dynamic.get(at, {}).items()}
            for at in range(len(self.example))
        ]
        parameters = inspect.signature(self.module.forward).parameters.values()
        named_count = sum(parameter.kind is not parameter.VAR_POSITIONAL for parameter in parameters)
        dynamic = (*shapes[:named_count], *([tuple(shapes[named_count:])] if named_count < len(shapes) else []))
        exported = export(self.module, self.example, dynamic_shapes=dynamic, strict=False)
        inputs = [
            node.meta["val"] for node in exported.graph.nodes if node.name in exported.graph_signature.user_inputs
        ]
        for at, dims in self.dynamic.items():
            for axis, dim in dims.items():
                size = inputs[at].shape[axis]
                if not (isinstance(size, torch.SymInt) and size.node.expr in exported.range_constraints):
                    raise CompileFailed(
                        f"the graph of {type(self.module).__name__} is specialized to one value of {dim.__name__}"
                    )
        return exported


@dataclass(frozen=True)
class Emitted:
    """Figures of a written `.pte`."""

    planned_bytes: int
    delegates: int
    nodes: int


class InPlacePlanning(MemoryPlanningPass):
    """Memory planning that does not allocate a second time for a buffer that a method writes in place and returns."""

    def run(self, graph_module: GraphModule, graph_signature: ExportGraphSignature | None = None) -> PassResult:
        """See the base class."""
        written = set()
        for node in graph_module.graph.nodes:
            if isinstance(node.target, EdgeOpOverload) and node.target._schema.name == "aten::index_put_":
                node.meta["spec"] = node.args[0].meta["spec"]
                written.add(node)
            elif node.target == memory.view and node.args[0] in written:
                view = node.meta["spec"]
                node.meta["spec"] = type(view)(node.args[0].meta["spec"], view.shape)
        output = graph_module.graph.output_node()
        output.meta["spec"] = tree_map(lambda result: getattr(result, "meta", {}).get("spec"), output.args[0])
        return super().run(graph_module, graph_signature)


class EdgeOperators(
    NormalizeTransposePass,
    ReplaceBrokenOpsWithFunctionalOpsPass,
    ScalarToTensorPass,
    SymToTensorPass,
    RemoveMixedTypeOperators,
    OpReplacePass,
    MemoryFormatOpsPass,
):
    """The passes of ExecuTorch's `to_edge` that change a program of ours, as one.

    Each of them traces the whole graph again to change its operators. Here an operator goes through all of them, in the
    order of the bases, in one trace.
    """

    def call_operator(self, op: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        """See the base classes. A view that functionalization leaves is none to them; a slice of everything goes."""
        if op == torch.ops.aten._unsafe_view.default:
            op = torch.ops.aten.view.default
        result = super().call_operator(op, args, kwargs, meta)
        if op == torch.ops.aten.slice.Tensor:
            sizes = args[0].to_tensor().shape, result.to_tensor().shape
            if sizes[0] == sizes[1] and all(isinstance(size, int) for size in sizes[0]):
                return args[0]
        return result

    def call(self, graph_module: GraphModule) -> PassResult:
        """See the base classes. One of them reports its own changes only, and an unchanged graph would be dropped."""
        return PassResult(super().call(graph_module).graph_module, modified=True)


def edge_config() -> EdgeCompileConfig:
    """Returns how programs are converted to ExecuTorch's edge operators."""
    return EdgeCompileConfig(_check_ir_validity=False, preserve_ops=list(WHOLE))


def edge_program(exported: ExportedProgram) -> ExportedProgram:
    """Returns an exported graph with ExecuTorch's edge operators, as its `to_edge` does with a trace for every pass."""
    decompositions = _default_decomposition_table()
    for operator in WHOLE:
        decompositions.pop(operator, None)
    decomposed = exported.run_decompositions(decompositions)
    verifier = EXIREdgeDialectVerifier(edge_compile_config=edge_config(), class_only=True)
    passes = (RemoveNonCoreAtenOpGraphAssertsPass(), EdgeOperators())
    edge = _transform(decomposed, *passes, override_verifiers=[verifier])
    return _transform(lift_constant_tensor_pass(edge), dead_code_elimination_pass, DebugHandleGeneratorPass())


def emit(methods: Mapping[str, Signature], stored: Set[str], path: Path) -> Emitted:
    """Exports every method with its example inputs and writes the `.pte`. stored: buffers in the `.ptd`."""
    programs = {name: edge_program(signature.export()) for name, signature in methods.items()}
    edge = EdgeProgramManager(programs, compile_config=edge_config())
    _start_b_at_zero(edge)
    placeholders = {"b_" + name.replace(".", "_") for name in stored}
    config = ExecutorchBackendConfig(
        memory_planning_pass=InPlacePlanning(share_mutable_buffers=True),
        emit_mutable_buffer_names=True,
        run_reinplace_pass=True,  # writes caches in place instead of copying them
        external_constants=lambda node: EXTERNAL if node.name in placeholders else None,
    )
    program = edge.to_executorch(config)
    plans = program.executorch_program.execution_plan
    data = program._pte_data
    if share_delegates(plans):
        data, _ = serialize_for_executorch(
            program._emitter_output, config, program._data_serializer, program._named_data
        )
    with path.open("wb") as file:
        data.write_to_file(file)
    return Emitted(
        planned_bytes=sum(sum(plan.non_const_buffer_sizes) for plan in plans),
        delegates=sum(len(plan.delegates) for plan in plans),
        nodes=sum(len(chain.instructions) for plan in plans for chain in plan.chains),
    )


def share_delegates(plans: Sequence[ExecutionPlan]) -> bool:
    """Makes all calls of one delegate within a method use one entry, and returns whether a method had more.

    The runtime prepares every entry by itself: a layer that runs once for each micro-batch would pack its weights as
    often.
    """
    shared = False
    for plan in plans:
        unique_delegates: list[BackendDelegate] = []
        places: dict[tuple[str, int], int] = {}  # by backend and blob
        place_of: list[int] = []
        for delegate in plan.delegates:
            key = delegate.id, delegate.processed.index
            if key not in places:
                places[key] = len(unique_delegates)
                unique_delegates.append(delegate)
            place_of.append(places[key])
        if len(unique_delegates) == len(plan.delegates):
            continue
        shared, plan.delegates = True, unique_delegates
        for chain in plan.chains:
            for instruction in chain.instructions:
                if isinstance(call := instruction.instr_args, DelegateCall):
                    call.delegate_index = place_of[call.delegate_index]
    return shared


def _start_b_at_zero(edge: EdgeProgramManager) -> None:
    """Initializes B with zeros in INITIALIZER only; loading any other method leaves B unchanged.

    Zeros in every method would add 4 D bytes each, and loading any of them would undo training.
    """
    for node in edge.exported_program(INITIALIZER).graph.nodes:
        if node.op == "placeholder" and node.name.startswith(f"b_{STATE}_"):
            node.meta["et_init_buffer"] = True
