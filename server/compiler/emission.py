"""From exported methods to one multi-method `.pte` whose methods share flat B.

Knows ExecuTorch's passes; knows nothing of recipes, layers or files' meaning.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig, to_edge
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.passes import MemoryPlanningPass
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils._pytree import tree_map

from server.compiler.estimators import STATE
from shared.errors import CompileFailed

EXTERNAL = "weights"  # tag of the constants that the .ptd holds
INITIALIZER = "adapter"  # the method that must be loaded before any other is called


@dataclass(frozen=True)
class Signature:
    """A method to export: its module, example inputs, and which dimensions of which inputs vary."""

    module: nn.Module
    example: tuple[Tensor, ...]
    dynamic: Mapping[int, Mapping[int, Dim]] = field(default_factory=dict)  # by input, then by dimension

    def export(self) -> ExportedProgram:
        """The module's graph. Raises CompileFailed if it holds for the example's lengths only."""
        if not self.dynamic:
            return export(self.module, self.example, strict=False)
        # A hint instead of the dimension: views of what a matrix product made give rise to conditions that always
        # hold, but that the exporter cannot prove, and for a named dimension it insists.
        shapes = [
            {axis: Dim.AUTO(min=dim.min, max=dim.max) for axis, dim in self.dynamic.get(at, {}).items()}
            for at in range(len(self.example))
        ]
        parameters = inspect.signature(self.module.forward).parameters.values()
        named = sum(parameter.kind is not parameter.VAR_POSITIONAL for parameter in parameters)
        dynamic = (*shapes[:named], *([tuple(shapes[named:])] if named < len(shapes) else []))
        exported = export(self.module, self.example, dynamic_shapes=dynamic, strict=False)
        inputs = [
            node.meta["val"] for node in exported.graph.nodes if node.name in exported.graph_signature.user_inputs
        ]
        for at, dims in self.dynamic.items():
            for axis, dim in dims.items():
                size = inputs[at].shape[axis]
                if not (isinstance(size, torch.SymInt) and size.node.expr in exported.range_constraints):
                    raise CompileFailed(f"{type(self.module).__name__} holds for one value of {dim.__name__} alone")
        return exported


@dataclass(frozen=True)
class Emitted:
    """Figures of a written `.pte`."""

    planned_bytes: int
    delegates: int
    nodes: int


class InPlacePlanning(MemoryPlanningPass):
    """Memory planning that knows a buffer written in place when a method returns it, and gives it no second place."""

    def run(self, graph_module: GraphModule, graph_signature: ExportGraphSignature | None = None) -> PassResult:
        """As the parent's."""
        for node in graph_module.graph.nodes:
            if isinstance(node.target, EdgeOpOverload) and node.target._schema.name == "aten::index_put_":
                node.meta["spec"] = node.args[0].meta["spec"]
        output = graph_module.graph.output_node()
        output.meta["spec"] = tree_map(lambda result: getattr(result, "meta", {}).get("spec"), output.args[0])
        return super().run(graph_module, graph_signature)


def emit(methods: Mapping[str, Signature], stored: set[str], path: Path) -> Emitted:
    """Exports every method with its example inputs and writes the `.pte`. stored: buffers that the `.ptd` holds."""
    edge = to_edge(
        {name: signature.export() for name, signature in methods.items()},
        compile_config=EdgeCompileConfig(_check_ir_validity=False, preserve_ops=[torch.ops.aten.linear.default]),
    )
    _start_b_at_zero(edge)
    placeholders = {"b_" + name.replace(".", "_") for name in stored}
    program = edge.to_executorch(
        ExecutorchBackendConfig(
            memory_planning_pass=InPlacePlanning(share_mutable_buffers=True),
            emit_mutable_buffer_names=True,
            run_reinplace_pass=True,  # a cache is written in place, not copied
            external_constants=lambda node: EXTERNAL if node.name in placeholders else None,
        )
    )
    with path.open("wb") as file:
        program.write_to_file(file)
    plans = program.executorch_program.execution_plan
    return Emitted(
        planned_bytes=sum(sum(plan.non_const_buffer_sizes) for plan in plans),
        delegates=sum(len(plan.delegates) for plan in plans),
        nodes=sum(len(chain.instructions) for plan in plans for chain in plan.chains),
    )


def _start_b_at_zero(edge: EdgeProgramManager) -> None:
    """Loading INITIALIZER stores B's zeros; every other method leaves B as it finds it, so it may come and go.

    Zeros in every method would add 4 D bytes for each, and loading any of them would undo training.
    """
    for node in edge.exported_program(INITIALIZER).graph.nodes:
        if node.op == "placeholder" and node.name.startswith(f"b_{STATE}_"):
            node.meta["et_init_buffer"] = True
