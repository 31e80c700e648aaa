"""What runs a program, each behind one small interface: how its layers are lowered, and what files it is made of.

Knows which backends there are. Their libraries are loaded when one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from server.compiler.emission import Emitted, Signature
from server.compiler.quantization import Scheme
from server.compiler.weights import Stored
from shared.program import Role
from shared.recipe import Backend as Name
from shared.recipe import Precision

HOMES: dict[Name, str] = {
    "xnnpack": "xnnpack:Xnnpack",
    "portable": "portable:Portable",
    "torch": "torch_export:TorchExport",
    "qnn": "qnn:Qnn",
    "vulkan": "vulkan:Vulkan",
}


class Backend(Protocol):
    """One way to run a program."""

    precisions: frozenset[Precision]  # of frozen linear layers that it computes
    dynamic_length: bool  # sequences shorter than the recipe's cost less
    files: Mapping[Role, str]  # names of the files that it writes

    def check(self) -> None:
        """Raises ToolchainMissing, naming what to install, when this machine cannot compile for it."""

    def write_weights(self, tensors: Iterable[Stored], path: Path) -> set[str]:
        """Writes a base's tensors, the same bytes for every recipe of that base and precision. Returns their keys."""

    def lower(
        self, layers: Sequence[nn.Module], example: tuple[Tensor, ...], scheme: Scheme | None, stored: set[str]
    ) -> list[nn.Module]:
        """Layers of one graph as the backend runs them.

        layers: equal but for their persistent buffers, whose integers `scheme` says how to store. example: inputs that
        they are exported with. stored: keys that the weights file holds.
        """

    def emit(self, methods: Mapping[str, Signature], stored: set[str], path: Path) -> Emitted:
        """Exports every method and writes the program file. stored: keys that the weights file holds."""


def backend(name: Name) -> Backend:
    """The backend of that name."""
    module, kind = HOMES[name].split(":")
    made: Backend = getattr(import_module(f"{__name__}.{module}"), kind)()
    return made
