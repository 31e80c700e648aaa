"""Predicts the memory that training takes, before its program is compiled.

The constants were fitted to compiled programs and to the peaks of runs in the native runner
(`tests/device_agent/engines/test_memory.py` compares both) that packs weights in memory, as on a phone. With a file of
packed weights it holds less, but is as fast only if the system has the memory to cache that file.
"""

from __future__ import annotations

from shared.program import WEIGHT_BYTES, kept_products, logits_part, lowers_softmax, transposed_bytes
from shared.recipe import REVERSE_ESTIMATORS, Optimizer, Recipe, directions_at_once
from shared.zo.lora import BaseShape, flat_size

PROCESS_BYTES = 12_500_000  # the native runner without a program
FLOAT_BYTES = 4
VECTORS: dict[Optimizer, int] = {"sgd": 1, "momentum": 2, "adam": 3}  # of D elements: B and the moments
QUARTER = 0.26  # size of 8-bit weights and their scales relative to float32 weights
# Hidden states of a token that the methods plan, beside those that layers keep for their reverse passes.
STATES, STATES_OF_PREFIX = 3, 2
# Of a private step: gradients of each example computed at once, temporaries of one layer's, and vectors for the noise.
KEPT_GRADIENTS, KEPT_GRADIENTS_DIRECTIONAL, LAYER_GRADIENTS, NOISE_VECTORS = 1, 2, 3, 4
# What XNNPACK holds while it computes a layer, forwards and backwards: states of a token as wide as the MLP, and
# matrices of attention scores.
WIDE_STATES, WIDE_STATES_REVERSE = 3, 10
SCORES, SCORES_REVERSE = 1, 3
# Where the answer's positions alone are perturbed: states of a token of every path, and copies of B for each query.
ANSWER_STATES, ANSWER_COPIES = 2, 4
# Copies of one part's logits (`logits_part`) that the methods plan together, where the loss is over the vocabulary.
LOGITS, LOGITS_REVERSE, LOGITS_REVERSE_QUANTIZED = 6, 9, 12
# The same where XNNPACK computes the softmax too, and copies that it then holds for the reverse of a quantized table.
LOGITS_LOWERED, LOGITS_WORKSPACE = 4, 6


def predicted_peak(recipe: Recipe, shape: BaseShape, parameters: int) -> int:
    """Predicts the peak resident bytes of the native runner that trains a recipe.

    parameters: weights of the base.
    """
    weight = FLOAT_BYTES * (1.0 if recipe.precision == "fp32" else QUARTER)
    layers = sum(shape.layer_weights)
    linear = layers * WEIGHT_BYTES.get(recipe.precision, weight)
    weights = round((parameters - layers) * weight + linear) + transposed_bytes(recipe, shape)
    return PROCESS_BYTES + weights + planned_bytes(recipe, shape) + _workspace_bytes(recipe, shape)


def planned_bytes(recipe: Recipe, shape: BaseShape) -> int:
    """Predicts the bytes that the runtime plans for activations, vectors and an optimizer's state."""
    states = STATES
    if recipe.frozen_layers(shape.layers):
        states += STATES_OF_PREFIX
    tokens = recipe.score_rows * recipe.sequence_length
    size, layers = flat_size(recipe, shape), len(recipe.adapted_layers(shape.layers))
    examples = _example_bytes(recipe, size, layers)
    elements = shape.hidden * (states * tokens + ANSWER_STATES * answer_tokens(recipe)) + _logits(recipe, shape)
    return vector_bytes(recipe, size) + examples + FLOAT_BYTES * (elements + tokens * _kept(recipe, shape, layers))


def _kept(recipe: Recipe, shape: BaseShape, adapted: int) -> int:
    """Returns the elements of a token that layers keep for their reverse passes. adapted: number of layers with a B.

    They are a layer's input, attention's output, keys, values, `kept_products`, and the products with A. Norms of
    heads, with which keys are not kept, and the last layer of programs that compute it at the answer alone are not
    counted.
    """
    if recipe.estimator not in REVERSE_ESTIMATORS:
        return 0
    kinds, kept = shape.of_layers(recipe.frozen_layers(shape.layers)), kept_products(recipe, shape)
    outputs = sum(kind.features(target)[1] for kind in kinds for target in ("k_proj", "v_proj", *kept))
    return 2 * len(kinds) * shape.hidden + outputs + adapted * recipe.rank * len(recipe.targets)


def answer_tokens(recipe: Recipe) -> int:
    """Returns the answer tokens of all paths, in a step that perturbs them alone."""
    return recipe.answer_paths * recipe.effective_batch * recipe.answer_length if recipe.perturbed == "answers" else 0


def _logits(recipe: Recipe, shape: BaseShape) -> int:
    """Predicts the planned elements of logits over the vocabulary."""
    if recipe.loss == "candidates":
        return 0
    copies = LOGITS
    if lowers_softmax(recipe, _answers_at_once(recipe), shape.vocabulary):
        copies = LOGITS_LOWERED
    elif recipe.estimator in REVERSE_ESTIMATORS:
        copies = LOGITS_REVERSE if recipe.precision == "fp32" else LOGITS_REVERSE_QUANTIZED
    return copies * logits_part(_answers_at_once(recipe), shape.vocabulary) * shape.vocabulary


def _answers_at_once(recipe: Recipe) -> int:
    """Returns the answer tokens of all paths and of the rows that are computed at once."""
    return recipe.rows * recipe.answer_paths * recipe.answer_length


def rough(size: int) -> int:
    """Rounds a device's free memory, bytes, down to two digits, for reasons that submitters of jobs read."""
    unit: int = 10 ** max(len(str(size)) - 2, 0)
    return size // unit * unit


def vector_bytes(recipe: Recipe, size: int) -> int:
    """Predicts the planned bytes of B, its paths, their noise and an optimizer's state. size: D."""
    match recipe.estimator:
        case "gradient":
            return FLOAT_BYTES * size * (10 + 15 * VECTORS[recipe.optimizer])
        case "directional":
            moments = VECTORS[recipe.optimizer] - 1 if recipe.keeps_optimizer else 0
            drawn = directions_at_once(recipe.queries, size, looped=recipe.backend != "torch") * size
            return FLOAT_BYTES * ((28 + 15 * moments) * size + 3 * drawn)
        case "stored":
            return FLOAT_BYTES * size * (23 + 28 * recipe.queries)  # it keeps two copies per query
        case "replay":
            copies = 5 if recipe.perturbed == "all" else ANSWER_COPIES
            return FLOAT_BYTES * size * (23 + copies * recipe.queries)


def _example_bytes(recipe: Recipe, size: int, layers: int) -> int:
    """Predicts the planned bytes of a private step: gradients of single examples, and the noise on D.

    size: D. layers: the number of adapted ones.
    """
    if recipe.privacy != "clipped" or recipe.estimator not in REVERSE_ESTIMATORS:
        return 0
    if recipe.estimator == "directional":
        return FLOAT_BYTES * KEPT_GRADIENTS_DIRECTIONAL * recipe.rows * size
    row_values = KEPT_GRADIENTS * size + LAYER_GRADIENTS * size // layers
    return FLOAT_BYTES * (recipe.rows * row_values + NOISE_VECTORS * size)


def _workspace_bytes(recipe: Recipe, shape: BaseShape) -> int:
    """Predicts the bytes that XNNPACK holds while it computes one layer, or a part of the loss over the vocabulary."""
    reverse = recipe.estimator in REVERSE_ESTIMATORS
    wide, scores = (WIDE_STATES_REVERSE, SCORES_REVERSE) if reverse else (WIDE_STATES, SCORES)
    per_token = wide * shape.intermediate + scores * shape.heads * recipe.sequence_length
    tokens = max(recipe.score_rows * recipe.sequence_length, answer_tokens(recipe))
    positions, head = _answers_at_once(recipe), 0
    if reverse and recipe.precision != "fp32" and lowers_softmax(recipe, positions, shape.vocabulary):
        head = LOGITS_WORKSPACE * logits_part(positions, shape.vocabulary) * shape.vocabulary
    return FLOAT_BYTES * max(tokens * per_token, head)
