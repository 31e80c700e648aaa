"""Ways to choose LoRA-FA's frozen A from data, and how much of a gradient each lets through.

A choice is columns (in, R), most important first; the first r of them are the choice at rank r. Their scale has no
meaning: choices are compared at equal Frobenius norm of A.
"""

import numpy as np
import torch
from torch import Tensor

from shared.recipe import Recipe
from shared.zo.lora import LoraModule, init_a


def orthogonal(recipe: Recipe, module: LoraModule) -> np.ndarray:
    """Returns the paper's random A with orthonormal columns. float32 (in, r)."""
    found: np.ndarray = np.linalg.qr(init_a(recipe, module))[0]
    return found


def top_activations(activations: Tensor, rank: int) -> np.ndarray:
    """Returns right singular vectors of a layer's inputs, largest first, from x^T x (in, in): float32 (in, rank)."""
    found: np.ndarray = _top(activations.double(), rank).float().cpu().numpy()
    return found


def top_gradient(gradient: Tensor, rank: int) -> np.ndarray:
    """Returns left singular vectors of dL/dW (in, out), largest first, which let most through: float32 (in, rank)."""
    g = gradient.double()
    if g.shape[0] > g.shape[1]:  # eigenvectors of the smaller side cost less
        vectors = torch.nn.functional.normalize(g @ _top(g.T @ g, rank), dim=0)
    else:
        vectors = _top(g @ g.T, rank)
    found: np.ndarray = vectors.float().cpu().numpy()
    return found


def captured(columns: np.ndarray, gradient: Tensor) -> float:
    """Returns |A^T G|^2 at |A|_F = 1: columns of A (in, r), G = dL/dW (in, out)."""
    a = torch.from_numpy(columns).to(gradient)
    return float(((a.T @ gradient) ** 2).sum() / (a**2).sum())


def most_captured(gradient: Tensor, rank: int) -> np.ndarray:
    """Returns the most that r orthogonal columns of equal length capture, r = 1 to `rank`: float64 (rank,).

    It is the mean of the r largest squared singular values of G.
    """
    g = gradient.double()
    values = torch.linalg.eigvalsh(g.T @ g if g.shape[0] > g.shape[1] else g @ g.T).flip(0)[:rank]
    found: np.ndarray = (values.cumsum(0) / torch.arange(1, len(values) + 1, device=values.device)).cpu().numpy()
    return found


def _top(symmetric: Tensor, rank: int) -> Tensor:
    """Returns eigenvectors of the largest eigenvalues, largest first: (n, rank)."""
    return torch.linalg.eigh(symmetric)[1].flip(1)[:, :rank].contiguous()
