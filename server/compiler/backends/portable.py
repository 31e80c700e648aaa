"""ExecuTorch's portable operators: they run wherever its runtime does, slowly. Knows no delegate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from server.compiler.emission import Emitted, Signature, emit
from server.compiler.quantization import Scheme
from server.compiler.weights import Stored, write_weights
from shared.program import Role
from shared.recipe import Precision


class Portable:
    """Every layer stays as it is. What else ExecuTorch runs is made from this."""

    precisions: frozenset[Precision] = frozenset({"fp32"})
    dynamic_length = True
    files: Mapping[Role, str] = {"program": "program.pte", "weights": "weights.ptd", "tokenizer": "tokenizer.json"}

    def check(self) -> None:
        """It needs nothing but ExecuTorch itself."""

    def write_weights(self, tensors: Iterable[Stored], path: Path) -> set[str]:
        """The `.ptd`; see `Backend.write_weights`."""
        return write_weights(tensors, path)

    def lower(
        self, layers: Sequence[nn.Module], example: tuple[Tensor, ...], scheme: Scheme | None, stored: set[str]
    ) -> list[nn.Module]:
        """The layers themselves."""
        return list(layers)

    def emit(self, methods: Mapping[str, Signature], stored: set[str], path: Path) -> Emitted:
        """The `.pte`; see `Backend.emit`."""
        return emit(methods, stored, path)
