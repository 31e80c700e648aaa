"""The backend of ExecuTorch's portable operators, which run everywhere, but slowly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import nn

from server.compiler.export.emission import Emitted, Signature, emit
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.lowering import LayerGroup, unchanged
from server.compiler.export.weights import Stored, StoredKeys, write_weights
from shared.program import Role
from shared.recipe import Precision


class Portable:
    """Leaves every layer unchanged. It is the base class of the other ExecuTorch backends."""

    precisions: frozenset[Precision] = frozenset({"fp32"})
    dynamic_length = True
    files: Mapping[Role, str] = {"program": "program.pte", "weights": "weights.ptd", "tokenizer": "tokenizer.json"}

    def check(self) -> None:
        """Does nothing: only ExecuTorch itself is required."""

    def write_weights(self, tensors: Iterable[Stored], path: Path) -> StoredKeys:
        """Writes the `.ptd`; see `Backend.write_weights`."""
        return write_weights(tensors, path)

    def lower(self, groups: Sequence[LayerGroup], stored: StoredKeys, kept: LoweredFiles) -> list[list[nn.Module]]:
        """Returns the layers unchanged."""
        return unchanged(groups)

    def emit(self, methods: Mapping[str, Signature], stored: StoredKeys, path: Path) -> Emitted:
        """Writes the `.pte`; see `Backend.emit`."""
        return emit(methods, stored, path)
