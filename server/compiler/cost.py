"""What one step costs in floating-point operations, from shapes alone. A multiply-add counts as two."""

from __future__ import annotations

from shared.lora import BaseShape
from shared.recipe import TARGETS, Recipe


def step_flops(recipe: Recipe, shape: BaseShape) -> int:
    """The matrix products of one `step`: 2 q E sequences through all layers, and lm_head where there are answers."""
    rows, sequence = recipe.score_rows, recipe.sequence_length
    tokens = rows * sequence
    base = sum(int.__mul__(*shape.features(target)) for target in TARGETS)
    adapted = sum(recipe.rank * sum(shape.features(target)) for target in recipe.targets)
    attention = 2 * rows * sequence * sequence * shape.heads * shape.head_dim
    scored = shape.vocabulary if recipe.loss == "full" else recipe.choices
    head = rows * recipe.answer_length * shape.hidden * scored
    return 2 * (shape.layers * (tokens * (base + adapted) + attention) + head)
