"""What merging takes of a machine's memory, estimated from shapes alone. Knows no database and no converter."""

from __future__ import annotations

from shared.lora import BaseShape, flat_size, lora_modules
from shared.recipe import Recipe

SHARD_BYTES = 1 << 30  # of a merged model's weight files, unless one tensor is larger
LIBRARIES_BYTES = 450 << 20  # torch, and transformers where a tokenizer is converted


def merge_bytes(recipe: Recipe, shape: BaseShape, parameters: int) -> int:
    """Peak resident bytes of merging an adapter into a base of that shape and so many parameters.

    One file's tensors at a time, and once more as they are written; the largest tensor as read; A and B.
    """
    largest = 4 * max(shape.vocabulary * shape.hidden, *(i * o for i, o in map(shape.features, shape.linears)))
    shard = min(4 * parameters, max(SHARD_BYTES, largest))
    a_elements = sum(module.in_features * module.rank for module in lora_modules(recipe, shape))
    return LIBRARIES_BYTES + 2 * shard + 2 * largest + 4 * (a_elements + 2 * flat_size(recipe, shape))
