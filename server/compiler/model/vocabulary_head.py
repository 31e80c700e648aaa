"""lm_head over the whole vocabulary as layers to lower: its logits, their softmax, and the product with its table.

XNNPACK reads the same bytes as the rows of the table, and packs them a second time, transposed, for a reverse pass.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from server.compiler.model.quantization import linear, quantized_tokens, transposed_weight
from server.compiler.model.reverse import no_bias
from server.compiler.model.rounding import ROWS, SCALE

LEVELS = (2.0**-6, 2.0**-12)  # parts of a probability that are quantized apart; the last one loses less than 2^-20


class HeadLayer(nn.Module):
    """lm_head's logits."""

    def __init__(self, values: Tensor, scales: Tensor | None) -> None:
        """values: (V, hidden), int8 with scales (V,), or float32."""
        super().__init__()
        self.register_buffer("lm_head", values)
        self.register_buffer("lm_head" + SCALE, scales)

    def forward(self, answers: Tensor) -> Tensor:
        """answers (R, T, hidden) -> logits (R, T, V)."""
        if self.lm_head_scale is None:
            return functional.linear(answers, self.lm_head)
        return linear(answers, (self.lm_head, self.lm_head_scale), None, ROWS)


class HeadReverse(nn.Module):
    """Products of gradients (R, T, V) with lm_head's table (V, hidden)."""

    def __init__(self, values: Tensor) -> None:
        """values: (V, hidden), int8 or float32."""
        super().__init__()
        self.register_buffer("lm_head", values)
        self.register_buffer("bias", no_bias(values.shape[1]), persistent=False)

    def forward(self, weights: Tensor, *scales: Tensor) -> Tensor:
        """weights (R, T, V), not negative, and the scales (V, 1) of an int8 table -> (R, T, hidden).

        Parts of a weight are quantized apart: beside a large one, small ones would round to nothing.
        """
        rows, flat = weights.shape[0], weights.reshape(-1, weights.shape[2])
        if not scales:
            return torch.addmm(self.bias, flat, self.lm_head).reshape(rows, -1, self.bias.shape[0])
        by_token = scales[0].reshape(1, -1)
        rest, parts = flat * by_token, list[Tensor]()
        for level in LEVELS:
            below = torch.minimum(rest, by_token * level)
            parts.append(rest - below)
            rest = below
        # All parts side by side, so that the table is read once.
        operand = quantized_tokens(torch.cat((rest, *parts)))
        products = torch.addmm(self.bias, operand, transposed_weight(self.lm_head))
        count = flat.shape[0]
        total = products[:count]
        for part in range(1, len(parts) + 1):
            total = total + products[part * count : (part + 1) * count]
        return total.reshape(rows, -1, self.bias.shape[0])


class SoftmaxHead(nn.Module):
    """lm_head's logits, their softmax, and the softmax's product with the table where a reverse pass needs it."""

    def __init__(self, head: HeadLayer, reverse: HeadReverse | None, cap: float | None) -> None:
        """cap: of the base's logits."""
        super().__init__()
        self.head, self.reverse, self.cap = head, reverse, cap

    def forward(self, answers: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
        """answers (R, T, hidden) -> logits (R, T, V), their softmax (R, T, V), and with `reverse` the product of the
        softmax, times the cap's slope, with the table, (R, T, hidden). scales: see `HeadReverse`.
        """
        logits = self.head(answers)
        bent = None if self.cap is None else torch.tanh(logits * (1 / self.cap))
        if bent is not None:
            logits = bent * self.cap
        weights = torch.softmax(logits, dim=-1)
        if self.reverse is None:
            return logits, weights
        sloped = weights if bent is None else weights * (1.0 - bent * bent)
        return logits, weights, self.reverse(sloped, *scales)
