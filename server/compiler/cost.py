"""Floating-point operations of one step, computed from shapes. A multiply-add counts as two."""

from __future__ import annotations

from shared.recipe import REVERSE_ESTIMATORS, Recipe
from shared.zo.lora import BaseShape


def step_flops(recipe: Recipe, shape: BaseShape) -> int:
    """Returns the operations of the matrix products of one `step` at full length, with lm_head at answers only.

    E sequences pass the frozen layers below the first adapted one. 2 q E sequences pass the other layers, or E with an
    exact gradient. Where the answer's positions alone are perturbed, E sequences and the answers of 2 q E pass them.
    Norms and a gradient's projections on directions are not counted.
    """
    adapted, frozen = set(recipe.adapted_layers(shape.layers)), recipe.frozen_layers(shape.layers)
    once, every = recipe.effective_batch, recipe.paths * recipe.effective_batch  # sequences
    exact = recipe.estimator in REVERSE_ESTIMATORS
    products = sum(
        _layer_products(recipe, shape, once if layer < frozen else every, layer in adapted)
        for layer in range(shape.layers)
    )
    if exact:
        # Each layer above the frozen ones is recomputed, except the last product of its MLP, and each product has one
        # for the gradient of its input. The products of attention and of B have one for each factor.
        for layer in range(frozen, shape.layers):
            products += 2 * _layer_products(recipe, shape, every, layer in adapted)
            products += every * _attention_products(recipe, shape)
            if layer in adapted:
                products += (
                    every
                    * recipe.sequence_length
                    * recipe.rank
                    * sum(shape.features(target)[1] for target in recipe.targets)
                )
    answers = recipe.answer_paths * recipe.effective_batch * recipe.answer_length  # tokens
    if recipe.perturbed == "answers":
        # Scores with the sequence's keys and a path's own, and values of both, with zeros before the sequence's.
        attention = (2 * recipe.sequence_length + 3 * recipe.answer_length) * shape.heads * shape.head_dim
        products += sum(
            answers * (_layer_weights(recipe, shape, layer in adapted) + attention)
            for layer in range(frozen, shape.layers)
        )
    scored = shape.vocabulary if recipe.loss == "full" else recipe.choices
    head = answers * shape.hidden * scored * (2 if exact else 1)
    return 2 * (products + head)


def _layer_products(recipe: Recipe, shape: BaseShape, rows: int, adapted: bool) -> int:
    """Returns the multiply-adds of one decoder layer over `rows` sequences."""
    token = _layer_weights(recipe, shape, adapted)
    return rows * (recipe.sequence_length * token + _attention_products(recipe, shape))


def _layer_weights(recipe: Recipe, shape: BaseShape, adapted: bool) -> int:
    """Returns the weights that one token meets in a decoder layer, those of an adapter included."""
    weights = sum(int.__mul__(*shape.features(target)) for target in shape.linears)
    if adapted:
        weights += recipe.rank * sum(sum(shape.features(target)) for target in recipe.targets)
    return weights


def _attention_products(recipe: Recipe, shape: BaseShape) -> int:
    """Returns the multiply-adds of one sequence's attention: the scores and the weighted sum of values."""
    return 2 * recipe.sequence_length**2 * shape.heads * shape.head_dim
