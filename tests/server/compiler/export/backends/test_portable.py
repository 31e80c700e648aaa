"""A graph that holds for one length only is refused; `test_step.py` runs portable programs at every length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from server.compiler.export.emission import Signature
from shared.errors import CompileFailed


class Fixed(nn.Module):
    """Writes its length down."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, 12) + 1.0


def test_a_graph_that_holds_for_one_length_is_refused() -> None:
    signature = Signature(Fixed(), (torch.zeros(2, 12),), {0: {1: Dim("S", min=2, max=12)}})
    with pytest.raises(CompileFailed, match="the graph of Fixed is specialized to one value of S"):
        signature.export()
