"""Losses of preferences in the graph: DPO (Rafailov et al. 2023, equation 7), KTO (Ethayarajh et al. 2024, equation 8).

A row's log-ratio is r = log pi(answer | prompt) - log pi_ref(answer | prompt), with pi_ref the model before training.
An example has two rows, side by side (`shared.zo.packing.pack_preferences`):

    dpo   the preferred and the rejected text: -log sigmoid(m) with m = beta (r_preferred - r_rejected)
    kto   a text, and the answer of another example after the same prompt: |w| (1 - sigmoid(m)) with
          m = sign(w) beta (r - z), w > 0 for a text that is preferred. z is the mean log-ratio of the micro-batch's
          second rows, at least 0 and without a gradient: an estimate of the divergence KL(pi || pi_ref)
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.compiler.methods.step_inputs import StepInputs
from shared.recipe import Recipe


def preference_losses(recipe: Recipe, nll: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
    """Returns the examples' losses (n, E/2) on n paths, 0 for an absent one, and their derivatives (n, E) by each row's
    negative log-likelihood.

    nll: (n*E, T), of the answer tokens. E: the rows of `inputs`.
    """
    rows, tokens = inputs.mask.shape
    sums = (nll.reshape(-1, rows, tokens) * inputs.mask.unsqueeze(0)).sum(dim=2)  # (n, E)
    ratios = (-sums - inputs.reference.unsqueeze(0)).reshape(-1, rows // 2, 2)  # (n, E/2, 2)
    weights = inputs.weights.reshape(1, -1, 2)
    own = weights[:, :, :1]
    if recipe.loss == "dpo":
        margins = (ratios * weights).sum(dim=2, keepdim=True) * inputs.beta  # (n, E/2, 1)
        slopes = torch.sigmoid(-margins)
        losses = torch.clamp(-margins, min=0.0) + torch.log1p(torch.exp(-torch.abs(margins)))
    else:
        # One estimate for all paths: the difference of two paths must not contain its gradient.
        others = ratios[:, :, 1:].mean(dim=0, keepdim=True) * torch.abs(torch.sign(own))
        divergence = torch.clamp(others.sum(dim=1, keepdim=True) / example_count(inputs), min=0.0)
        margins = (ratios[:, :, :1] - divergence) * torch.sign(own) * inputs.beta
        losses = torch.sigmoid(-margins)
        slopes = losses * (1.0 - losses)
    return (losses * torch.abs(own)).squeeze(2), (weights * (slopes * inputs.beta)).reshape(-1, rows)


def example_count(inputs: StepInputs) -> Tensor:
    """The number of examples [1], at least 1."""
    present = torch.abs(torch.sign(inputs.weights.reshape(-1, 2)[:, :1])).reshape(-1)
    return torch.clamp(present.sum(dim=0, keepdim=True), min=1.0)
