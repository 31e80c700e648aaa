"""The gated short convolution that some layers have instead of attention (LFM2): its tables, product and reverse.

With an input x (S, hidden), y = o_proj(q_proj(x) * convolution(k_proj(x) * v_proj(x))), where the names are the targets
of `BaseShape.conv_layers` and every feature has its own causal kernel.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from server.compiler.checkpoints.base import BaseFacts
from server.compiler.model.layer_inputs import AttentionTables, LayerInputs

if TYPE_CHECKING:
    from server.compiler.model.reverse import Kept, Reversal, ReverseLayer


class ConvolutionTables(nn.Module):
    """The tables of layers with a convolution: for each tap, which position meets which one's input.

    A convolution is a sum of products with these matrices, whose operations are those of attention. No slice of a
    sequence would run every length.
    """

    def __init__(self, facts: BaseFacts, bound: int) -> None:
        """bound: the longest sequence, tokens."""
        super().__init__()
        self.taps = facts.conv_taps
        self.register_buffer("at", torch.arange(bound + 1), persistent=False)

    def forward(self, length: int, rows: int) -> tuple[Tensor, ...]:
        """The tables (R, S, S) for `rows` sequences of `length`, in the order of the taps."""
        at = self.at[:length]
        return tuple(table.repeat(rows, 1, 1) for table in self.between(at.reshape(1, -1, 1), at.reshape(1, 1, -1)))

    def picked(self, length: int, positions: Tensor) -> tuple[Tensor, ...]:
        """The tables (R, T, S) of a layer whose outputs are at `positions` (R, T) alone."""
        return tuple(self.between(positions.unsqueeze(2), self.at[:length].reshape(1, 1, -1)))

    def between(self, outputs: Tensor, inputs: Tensor) -> list[Tensor]:
        """The tables (R, T, K) of outputs at positions (R, T, 1) and inputs at positions (R, 1, K)."""
        distance = outputs - inputs
        return [(distance == back).to(torch.float32) for back in reversed(range(self.taps))]


def convolution(x: Tensor, tables: AttentionTables) -> Tensor:
    """A causal convolution of x (R, S, hidden) with a kernel for each feature: (R, S, hidden), or at the picks."""
    total = torch.bmm(tables.shifts[0], x) * tables.taps[0]
    for shift, tap in zip(tables.shifts[1:], tables.taps[1:], strict=True):
        total = total + torch.bmm(shift, x) * tap
    return total


class Convolution:
    """The gated convolution of one layer with what its reverse needs."""

    def __init__(
        self,
        layer: ReverseLayer,
        x: Tensor,
        query_input: Tensor,
        reversal: Reversal,
        inputs: LayerInputs,
        kept: Kept | None = None,
    ) -> None:
        """As `Attention`. query_input: the output gate's."""
        self.layer, self.reversal, self.tables = layer, reversal, inputs.tables
        self.gate = layer.linear("q_proj", query_input, reversal)
        keys = None if kept is None else kept.keys
        self.keys = layer.linear("k_proj", x, reversal) if keys is None else keys
        self.values = layer.linear("v_proj", x, reversal) if kept is None else kept.values
        self.convolved = convolution(self.keys * self.values, self.tables)
        if kept is not None:
            self.output = kept.mixed
            return
        self.output = layer.attention_output(self.gate * self.convolved, reversal)

    def reverse(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """gradient of the output, (E, S, hidden) -> of `query_input`, and of x by the gated input alone.

        A convolution's transpose sums the products with the transposed tables.
        """
        layer, reversal = self.layer, self.reversal
        gradient = layer.linear_reverse("o_proj", gradient, reversal)
        of_convolved = gradient * self.gate
        of_gated = [
            torch.bmm(shift.permute(0, 2, 1), of_convolved * tap)
            for shift, tap in zip(self.tables.shifts, self.tables.taps, strict=True)
        ]
        total = of_gated[0]
        for more in of_gated[1:]:
            total = total + more
        of_x = layer.linear_reverse("k_proj", total * self.values, reversal)
        of_x = of_x + layer.linear_reverse("v_proj", total * self.keys, reversal)
        return layer.linear_reverse("q_proj", gradient * self.convolved, reversal), of_x
