"""Which bases a precision can represent."""

from __future__ import annotations

from shared.errors import InvalidRecipe
from shared.recipe import Precision
from shared.zo.lora import BaseShape

# The input features of a linear layer must be a multiple of this: complete groups with one scale, or whole bytes. In a
# reverse pass, which multiplies by the transposed weights, int4 requires it of the output features too.
INPUT_MULTIPLES: dict[Precision, int] = {"int4": 32, "int4-weight": 2}


def check_precision(precision: Precision, shape: BaseShape, *, reverse: bool = False) -> None:
    """Raises InvalidRecipe, with the layer and a remedy, if a linear layer cannot be stored in `precision`.

    reverse: whether the program has a reverse pass.
    """
    multiple = INPUT_MULTIPLES.get(precision, 1)
    for target in shape.linears:
        features, outputs = shape.features(target)
        if reverse and outputs % multiple:
            raise InvalidRecipe(
                f"exact gradients in {precision} require a multiple of {multiple} output features; {target} has "
                f"{outputs}; use int8, or estimator replay"
            )
        if features % multiple:
            raise InvalidRecipe(
                f"precision {precision} requires a multiple of {multiple} input features; {target} has "
                f"{features}; use {'int8-weight' if precision == 'int4-weight' else 'int8'}"
            )
