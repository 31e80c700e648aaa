"""Decoder layers as Vulkan delegates, for GPUs of phones; the rest stays portable.

Vulkan's compiler names a delegate's constants as XNNPACK's does, by the sha256 of their bytes, so both read one `.ptd`
and are lowered by one template. Knows no device: ExecuTorch's wheel compiles for Vulkan, but its runtime cannot run the
result; that takes a runtime built with the Vulkan backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from torch import Tensor, nn
from torch.export import ExportedProgram

from server.compiler.backends.portable import Portable
from server.compiler.quantization import Scheme
from shared.errors import ToolchainMissing


class Vulkan(Portable):
    """A layer is a delegate if Vulkan takes all of it, else portable operators."""

    dynamic_length = False  # not tried: nothing here runs it

    def check(self) -> None:
        """Raises ToolchainMissing where ExecuTorch comes without its Vulkan compiler."""
        if find_spec("executorch.backends.vulkan") is None:
            raise ToolchainMissing(
                "backend vulkan needs ExecuTorch's Vulkan compiler (executorch.backends.vulkan), which this "
                "installation lacks; install the executorch wheel from PyPI, which has it"
            )

    def lower(
        self, layers: Sequence[nn.Module], example: tuple[Tensor, ...], scheme: Scheme | None, stored: set[str]
    ) -> list[nn.Module]:
        """One delegate per layer, or the layers themselves; see `Backend.lower`."""
        from executorch.backends.vulkan.vulkan_preprocess import VulkanBackend

        from server.compiler.backends.xnnpack import edge_program, lower_layers

        if not takes_whole(edge_program(layers[0], example)):
            return list(layers)
        return lower_layers(layers, example, scheme, stored, VulkanBackend)


def takes_whole(program: ExportedProgram) -> bool:
    """Whether Vulkan runs every operator of a graph, in one piece."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    tagged = VulkanPartitioner().partition(program).tagged_exported_program
    tags = {node.meta.get("delegation_tag") for node in tagged.graph.nodes if node.op == "call_function"}
    return len(tags) == 1 and None not in tags
