"""The named inputs of `step` and `suffix`, which an exported graph takes as a list of tensors.

`shared.program` lists the inputs of every method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from server.compiler.model.layer_inputs import ABSENT
from shared.privacy import NOISE_KEYS
from shared.program_inputs import SEED_DTYPE, TOKEN_DTYPE
from shared.recipe import PREFERENCE_LOSSES, Recipe

PER_ROW = ("positions", "answers", "choices", "choice_mask", "mask", "reference", "weights")


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step after its tokens or hidden states. E examples, T answer positions, C choices, q queries."""

    positions: Tensor = ABSENT  # (E, T): positions whose hidden states predict the answer tokens
    answers: Tensor = ABSENT  # (E, T): the answer tokens, with loss `full`
    choices: Tensor = ABSENT  # (E, T, C): possible tokens, the first is the truth, with loss `candidates`
    choice_mask: Tensor = ABSENT  # (E, T, C): 0 at padded choices
    mask: Tensor = ABSENT  # (E, T): weights of the answer tokens, 0 at padding
    reference: Tensor = ABSENT  # (E,): log-probabilities of the answers before training, with losses of preferences
    weights: Tensor = ABSENT  # (E,): of the rows, positive for a text that is preferred, negative for a rejected one
    beta: Tensor = ABSENT  # [1]: scale of log-ratios
    kl_weight: Tensor = ABSENT  # [1]: of KL(start || adapter)
    start: Tensor = ABSENT  # (D,): B before training
    seeds: Tensor = ABSENT  # int32 (q, 2), of the step's directions
    lr: Tensor = ABSENT  # [1]
    eps: Tensor = ABSENT  # [1]: perturbation scale
    max_norm: Tensor = ABSENT  # [1]: upper bound of the mean gradient's norm; infinity: it is not clipped
    weight_decay: Tensor = ABSENT  # [1]: decoupled from the gradient (AdamW, Loshchilov and Hutter, 2019)
    clip: Tensor = ABSENT  # [1]: largest contribution of one example, in a private step
    sigma: Tensor = ABSENT  # [1]: noise multiplier
    last: Tensor = ABSENT  # [1]: 1 in the last call of a private step, which adds the noise and moves B; else 0
    keys: Tensor = ABSENT  # int32 (NOISE_KEYS, 2): secret keys of this step's noise alone
    carried: Tensor = ABSENT  # (q,) or int32 (D,): sum over the calls of the step before this one

    @classmethod
    def of(cls, recipe: Recipe, tensors: Sequence[Tensor]) -> StepInputs:
        """Returns the inputs of a recipe's step from the list that its graph takes."""
        return cls(**dict(zip(input_names(recipe), tensors, strict=True)))

    @classmethod
    def example(cls, recipe: Recipe, size: int) -> StepInputs:
        """Returns inputs to export a recipe's step with. size: D."""
        e, t, c, q = recipe.effective_batch, recipe.answer_length, recipe.choices, recipe.queries
        exact = recipe.estimator == "gradient"
        tensors = {
            "positions": zero_tokens(e, t),
            "answers": zero_tokens(e, t),
            "choices": zero_tokens(e, t, c),
            "choice_mask": torch.ones(e, t, c),
            "mask": torch.ones(e, t),
            "reference": torch.zeros(e),
            "weights": torch.ones(e),
            "start": torch.zeros(size),
            "seeds": zero_seeds(q),
            "keys": zero_seeds(NOISE_KEYS),
            "carried": torch.zeros(size, dtype=torch.int32) if exact else torch.zeros(q),
        }
        return cls(**{name: tensors.get(name, torch.ones(1)) for name in input_names(recipe)})

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """Returns the inputs that are present, in the order in which a graph takes them."""
        return tuple(tensor for tensor in vars(self).values() if tensor is not ABSENT)

    @property
    def columns(self) -> dict[str, Tensor]:
        """The inputs with E rows, by name."""
        return {name: tensor for name, tensor in vars(self).items() if name in PER_ROW and tensor is not ABSENT}

    def micro_batches(self, recipe: Recipe, first: Tensor) -> list[tuple[Tensor, StepInputs]]:
        """Returns each micro-batch's rows of `first` (E, ...) and of these inputs."""
        columns = self.columns
        parts = micro_batches(recipe, first, *columns.values())
        return [(rows, replace(self, **dict(zip(columns, others, strict=True)))) for rows, *others in parts]


def input_names(recipe: Recipe) -> tuple[str, ...]:
    """Returns the names of a step's inputs after its tokens or hidden states, in the order of `StepInputs`."""
    exact, private = recipe.estimator == "gradient", recipe.privacy == "clipped"
    labels = ("choices", "choice_mask") if recipe.loss == "candidates" else ("answers",)
    preference = ("reference", "weights", "beta") if recipe.loss in PREFERENCE_LOSSES else ()
    divergence = ("kl_weight", "start") if recipe.kl else ()
    rates = ("lr", "max_norm", "weight_decay") if exact else ("seeds", "lr", "eps")
    secret = ("clip", "sigma", "last", "keys", "carried") if exact else ("clip", "carried")
    return ("positions", *labels, "mask", *preference, *divergence, *rates, *(secret if private else ()))


def micro_batches(recipe: Recipe, *columns: Tensor) -> list[tuple[Tensor, ...]]:
    """The columns (E, ...) of each micro-batch; one that holds everything is not sliced."""
    if recipe.rows == recipe.effective_batch:
        return [columns]
    starts = range(0, recipe.effective_batch, recipe.rows)
    return [tuple(each[start : start + recipe.rows] for each in columns) for start in starts]


def zero_tokens(*shape: int) -> Tensor:
    """Returns inputs with the data type of tokens."""
    return torch.from_numpy(np.zeros(shape, TOKEN_DTYPE))


def zero_seeds(count: int) -> Tensor:
    """Returns inputs with the data type of seeds, (count, 2)."""
    return torch.from_numpy(np.zeros((count, 2), SEED_DTYPE))
