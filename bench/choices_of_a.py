"""Ways to choose LoRA-FA's frozen A from what data say of a layer, and how much of a gradient each lets through.

All are columns (in, R), the most important first, so that the first r of them are the choice at rank r. Their scale
means nothing: choices are compared at equal Frobenius norm of A.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shared.lora import LoraModule, init_a
from shared.recipe import Recipe


def kaiming(recipe: Recipe, module: LoraModule) -> np.ndarray:
    """The paper's: random uniform entries, as every program draws them. float32 (in, r)."""
    return init_a(recipe, module)


def orthogonal(recipe: Recipe, module: LoraModule) -> np.ndarray:
    """The same, made orthonormal column by column. float32 (in, r)."""
    found: np.ndarray = np.linalg.qr(init_a(recipe, module))[0]
    return found


def top_activations(activations: Tensor, rank: int) -> np.ndarray:
    """Right singular vectors of a layer's inputs, largest first, from x^T x (in, in): float32 (in, rank)."""
    return _top(activations.double(), rank).float().cpu().numpy()


def top_gradient(gradient: Tensor, rank: int) -> np.ndarray:
    """Left singular vectors of dL/dW (in, out), largest first: what lets most of it through. float32 (in, rank)."""
    g = gradient.double()
    if g.shape[0] > g.shape[1]:  # the smaller side's eigenvectors cost less
        vectors = torch.nn.functional.normalize(g @ _top(g.T @ g, rank), dim=0)
    else:
        vectors = _top(g @ g.T, rank)
    return vectors.float().cpu().numpy()


def captured(columns: np.ndarray, gradient: Tensor) -> float:
    """|A^T G|^2 at |A|_F = 1: columns of A (in, r), G = dL/dW (in, out)."""
    a = torch.from_numpy(columns).to(gradient)
    return float(((a.T @ gradient) ** 2).sum() / (a**2).sum())


def most_captured(gradient: Tensor, rank: int) -> np.ndarray:
    """The most that A of r orthogonal columns of equal length captures, r = 1 to `rank`: float64 (rank,).

    The mean of the r largest squared singular values of G.
    """
    g = gradient.double()
    values = torch.linalg.eigvalsh(g.T @ g if g.shape[0] > g.shape[1] else g @ g.T).flip(0)[:rank]
    return (values.cumsum(0) / torch.arange(1, len(values) + 1, device=values.device)).cpu().numpy()


def _top(symmetric: Tensor, rank: int) -> Tensor:
    """Eigenvectors of the largest eigenvalues, largest first: (n, rank)."""
    return torch.linalg.eigh(symmetric)[1].flip(1)[:, :rank].contiguous()
