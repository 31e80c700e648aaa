"""Decoder layers as Vulkan delegates for phone GPUs; the rest stays portable.

Like XNNPACK, Vulkan's compiler names a delegate's constants by the sha256 of their bytes, so both read the same `.ptd`
and are lowered from a template. ExecuTorch's wheel compiles for Vulkan but cannot run the result; that requires a
runtime built with the Vulkan backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from torch import nn
from torch.export import ExportedProgram, export

from server.compiler.export.backends import Backend
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.lowering import LayerGroup
from server.compiler.export.weights import StoredKeys
from shared.errors import ToolchainMissing


class Vulkan(Backend):
    """Lowers a layer to one delegate if Vulkan supports all of it, otherwise to portable operators."""

    dynamic_length = False  # untested without a Vulkan runtime

    def check(self) -> None:
        """Raises ToolchainMissing if ExecuTorch does not include its Vulkan compiler."""
        if find_spec("executorch.backends.vulkan") is None:
            raise ToolchainMissing(
                "backend vulkan needs ExecuTorch's Vulkan compiler (executorch.backends.vulkan), which this "
                "installation lacks; install the executorch wheel from PyPI, which has it"
            )

    def lower(self, groups: Sequence[LayerGroup], stored: StoredKeys, kept: LoweredFiles) -> list[list[nn.Module]]:
        """Returns one delegate per layer, or a group's unchanged layers; see `Backend.lower`."""
        from executorch.backends.vulkan.vulkan_preprocess import VulkanBackend

        from server.compiler.export.backends.xnnpack import lower_layers
        from server.compiler.export.emission import edge_program

        lowered: list[list[nn.Module]] = []
        for group in groups:
            if takes_whole(edge_program(export(group.layers[0], group.example, strict=False))):
                lowered += lower_layers([group], stored, kept, VulkanBackend)
            else:
                lowered.append(list(group.layers))
        return lowered


def takes_whole(program: ExportedProgram) -> bool:
    """Returns whether Vulkan supports every operator of a graph, in one partition."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    tagged = VulkanPartitioner().partition(program).tagged_exported_program
    tags = {node.meta.get("delegation_tag") for node in tagged.graph.nodes if node.op == "call_function"}
    return len(tags) == 1 and None not in tags
