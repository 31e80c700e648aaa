"""What one step costs in floating-point operations, from shapes alone. A multiply-add counts as two."""

from __future__ import annotations

from shared.lora import BaseShape
from shared.recipe import Recipe


def step_flops(recipe: Recipe, shape: BaseShape) -> int:
    """The matrix products of one `step` at its longest length, and of lm_head where there are answers.

    E sequences pass the frozen layers below the first adapted one, 2 q E the others; norms are not counted.
    """
    adapted, frozen = set(recipe.adapted_layers(shape.layers)), recipe.frozen_layers(shape.layers)
    once, every = recipe.effective_batch, recipe.score_rows  # sequences
    products = sum(
        _layer_products(recipe, shape, once if layer < frozen else every, layer in adapted)
        for layer in range(shape.layers)
    )
    scored = shape.vocabulary if recipe.loss == "full" else recipe.choices
    head = every * recipe.answer_length * shape.hidden * scored
    return 2 * (products + head)


def _layer_products(recipe: Recipe, shape: BaseShape, rows: int, adapted: bool) -> int:
    """Multiply-adds of one decoder layer over `rows` sequences."""
    sequence = recipe.sequence_length
    weights = sum(int.__mul__(*shape.features(target)) for target in shape.linears)
    if adapted:
        weights += recipe.rank * sum(sum(shape.features(target)) for target in recipe.targets)
    attention = 2 * sequence * sequence * shape.heads * shape.head_dim  # scores, and their mix of values
    return rows * (sequence * weights + attention)
