"""What a recipe costs, computed from shapes: the operations of one step, and the memory of its compilation."""

from __future__ import annotations

from collections.abc import Sequence

from shared.program import WIDE_PRODUCTS, kept_products, last_layer_picks
from shared.recipe import REVERSE_ESTIMATORS, Recipe, Target
from shared.zo.lora import BaseShape, flat_size

# Parts of a compilation's peak resident size, fitted to what tests/server/programs/test_memory.py lists.
LIBRARIES_BYTES = 500 << 20  # torch, ExecuTorch and a checkpoint's metadata
_READ_BYTES = 8  # for each element of the largest tensor: as stored in the checkpoint, in float32, and rounded
_CONSTANT_COPIES = 3  # of a tensor that graphs hold, while a program is emitted
_LAYER_COPIES = 2  # of one decoder layer, while it is lowered
_ADAPTED_BYTES = 55  # for each element of B: B, A and the graphs that contain them


def step_flops(recipe: Recipe, shape: BaseShape) -> int:
    """Returns the operations of the matrix products of one `step` at full length, with lm_head at answers only.

    E sequences pass the frozen layers below the first adapted one. 2 q E sequences pass the other layers, or E with an
    exact gradient. Where the answer's positions alone are perturbed, E sequences and the answers of 2 q E pass them.
    A multiply-add counts as two. Norms and a gradient's projections on directions are not counted.
    """
    adapted, frozen = set(recipe.adapted_layers(shape.layers)), recipe.frozen_layers(shape.layers)
    once, every = recipe.effective_batch, recipe.paths * recipe.effective_batch  # sequences
    exact = recipe.estimator in REVERSE_ESTIMATORS
    kinds, kept = shape.of_layers(), kept_products(recipe, shape)
    products = sum(
        _layer_products(recipe, kind, once if layer < frozen else every, layer in adapted)
        for layer, kind in enumerate(kinds)
    )
    if exact:
        picks = last_layer_picks(recipe)
        for layer in range(frozen, shape.layers - bool(picks)):
            targets = recipe.targets if layer in adapted else ()
            products += every * recipe.sequence_length * _reverse_weights(recipe, kinds[layer], targets, kept)
            products += 3 * every * _attention_products(recipe, kinds[layer])
        if picks:
            # Nothing of this layer is kept: it is recomputed, and each product has one for the gradient of its input.
            # The products of attention and of B have one for each factor. The MLP's last product is counted here,
            # though only bases with a norm after it compute it again.
            last, last_adapted = kinds[-1], shape.layers - 1 in adapted
            products += 2 * _layer_products(recipe, last, every, last_adapted)
            products += every * _attention_products(recipe, last)
            if last_adapted:
                products += every * recipe.sequence_length * _b_weights(recipe, last, recipe.targets)
            # Its queries, o_proj and MLP meet the answer's tokens alone, and so does attention.
            fewer = every * (recipe.sequence_length - picks)
            by_token = [target for target in shape.linears if target not in ("k_proj", "v_proj")]
            targets = tuple(target for target in recipe.targets if target in by_token and last_adapted)
            weights = _weights(recipe, last, by_token, targets)
            products -= fewer * (3 * weights + 4 * _attention_products(recipe, last) // recipe.sequence_length)
            products -= fewer * _b_weights(recipe, last, targets)
    answers = recipe.answer_paths * recipe.effective_batch * recipe.answer_length  # tokens
    if recipe.perturbed == "answers":
        # Scores with the sequence's keys and a path's own, and values of both, with zeros before the sequence's.
        attention = (2 * recipe.sequence_length + 3 * recipe.answer_length) * shape.heads * shape.head_dim
        products += sum(
            answers * (_layer_weights(recipe, kinds[layer], layer in adapted) + attention)
            for layer in range(frozen, shape.layers)
        )
    scored = recipe.choices if recipe.loss == "candidates" else shape.vocabulary
    head = answers * shape.hidden * scored * (2 if exact else 1)
    return 2 * (products + head)


def compile_bytes(recipe: Recipe, shape: BaseShape, parameters: int) -> int:
    """Estimates the peak resident bytes of compiling `recipe` for a base of that shape and number of parameters.

    The compiler holds one tensor while it reads, then one layer and the tables. Back ends other than XNNPACK have all
    weights in graphs.
    """
    layer = max(shape.layer_weights)
    outside = parameters - sum(shape.layer_weights)  # embedding, lm_head, positions and norms
    largest = max(shape.vocabulary * shape.hidden, *(int.__mul__(*shape.features(each)) for each in shape.linears))
    size = 4 if recipe.precision == "fp32" else 1
    constants = outside if recipe.backend == "xnnpack" else parameters
    emitted = size * (_CONSTANT_COPIES * constants + _LAYER_COPIES * layer) + _ADAPTED_BYTES * flat_size(recipe, shape)
    return LIBRARIES_BYTES + max(_READ_BYTES * largest, emitted)


def _layer_products(recipe: Recipe, shape: BaseShape, rows: int, adapted: bool) -> int:
    """Returns the multiply-adds of one decoder layer over `rows` sequences."""
    token = _layer_weights(recipe, shape, adapted)
    return rows * (recipe.sequence_length * token + _attention_products(recipe, shape))


def _layer_weights(recipe: Recipe, shape: BaseShape, adapted: bool) -> int:
    """Returns the weights that one token meets in a decoder layer, those of an adapter included."""
    return _weights(recipe, shape, shape.linears, recipe.targets if adapted else ())


def _reverse_weights(recipe: Recipe, shape: BaseShape, targets: Sequence[Target], kept: Sequence[Target]) -> int:
    """Returns the weights that one token meets in a layer's reverse pass. targets: those with a B.

    Each linear layer's are met for the gradient of its input, and once more where its output was not kept. A norm after
    the MLP or of heads, which needs further outputs, is not counted.
    """
    again = [target for target in shape.linears if target in WIDE_PRODUCTS and target not in kept]
    computed_again = _weights(recipe, shape, again, ()) + _b_weights(
        recipe, shape, [target for target in targets if target in again]
    )
    return _weights(recipe, shape, shape.linears, targets) + _b_weights(recipe, shape, targets) + computed_again


def _weights(recipe: Recipe, shape: BaseShape, linears: Sequence[Target], targets: Sequence[Target]) -> int:
    """Returns the weights of linear layers, and of the adapters of `targets`."""
    weights = sum(int.__mul__(*shape.features(target)) for target in linears)
    return weights + recipe.rank * sum(sum(shape.features(target)) for target in targets)


def _b_weights(recipe: Recipe, shape: BaseShape, targets: Sequence[Target]) -> int:
    """Returns the elements of B of one layer's `targets`."""
    return recipe.rank * sum(shape.features(target)[1] for target in targets)


def _attention_products(recipe: Recipe, shape: BaseShape) -> int:
    """Returns the multiply-adds of one sequence's attention: the scores and the weighted sum of values.

    A convolution is counted as attention with one head, though it has a product for each token that it reads.
    """
    return 2 * recipe.sequence_length**2 * shape.heads * shape.head_dim
