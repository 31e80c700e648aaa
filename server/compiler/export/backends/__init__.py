"""The backends that run programs, behind one interface: how layers are lowered and which files a program consists of.

The libraries of a backend are imported when it is requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from torch import nn

from server.compiler.export.emission import Emitted, Signature, emit
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.lowering import LayerGroup, unchanged
from server.compiler.export.weights import Stored, StoredKeys, write_weights
from shared.program import Role
from shared.recipe import Backend as Name
from shared.recipe import Precision

HOMES: dict[Name, str] = {
    "xnnpack": "xnnpack:Xnnpack",
    "torch": "torch_export:TorchExport",
    "qnn": "qnn:Qnn",
    "vulkan": "vulkan:Vulkan",
}


class Backend:
    """How layers are lowered and which files make up a program. By itself: portable operators, which are slow."""

    precisions: frozenset[Precision] = frozenset({"fp32"})  # supported precisions of frozen linear layers
    dynamic_length = True  # whether shorter sequences cost less than the recipe's length
    files: Mapping[Role, str] = {"program": "program.pte", "weights": "weights.ptd", "tokenizer": "tokenizer.json"}

    def check(self) -> None:
        """Raises ToolchainMissing, naming what to install, if this machine cannot compile for the backend."""

    def write_weights(self, tensors: Iterable[Stored], path: Path) -> StoredKeys:
        """Writes a base's tensors and returns their keys. The bytes depend on base and precision only."""
        return write_weights(tensors, path)

    def lower(self, groups: Sequence[LayerGroup], stored: StoredKeys, kept: LoweredFiles) -> list[list[nn.Module]]:
        """Lowers the layers of every group. stored: keys in the weights file. kept: graphs lowered before."""
        return unchanged(groups)

    def emit(self, methods: Mapping[str, Signature], stored: StoredKeys, path: Path) -> Emitted:
        """Exports every method and writes the program file. stored: keys in the weights file."""
        return emit(methods, stored, path)


def backend(name: Name) -> Backend:
    """Returns the backend with this name."""
    if name == "portable":
        return Backend()
    module, kind = HOMES[name].split(":")
    export_backend: Backend = getattr(import_module(f"{__name__}.{module}"), kind)()
    return export_backend
