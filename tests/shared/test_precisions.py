"""Which bases a precision can represent: whole groups and whole bytes of 4-bit weights."""

from __future__ import annotations

import pytest

from shared.errors import InvalidRecipe
from shared.precisions import check_precision
from shared.recipe import Precision
from shared.zo.lora import BaseShape


@pytest.mark.parametrize(
    ("precision", "dimensions", "refusal"),
    [
        (
            "int4",
            {"intermediate": 80},
            "int4 requires a multiple of 32 input features; down_proj has 80; use int8",
        ),
        ("int4", {"hidden": 48}, "q_proj has 48; use int8"),
        ("int4", {"heads": 3}, "o_proj has 24; use int8"),
        ("int4-weight", {"intermediate": 81}, "multiple of 2 input features; down_proj has 81; use int8-weight"),
    ],
)
def test_a_width_that_a_precision_cannot_represent_is_rejected(
    shape: BaseShape, precision: Precision, dimensions: dict, refusal: str
) -> None:
    narrow = shape.model_copy(update=dimensions)
    with pytest.raises(InvalidRecipe, match=refusal):
        check_precision(precision, narrow)
    for other in ("fp32", "int8", "int8-weight"):
        check_precision(other, narrow)
    check_precision(precision, shape)  # whole groups


def test_a_reverse_pass_in_groups_requires_whole_groups_of_outputs(shape: BaseShape) -> None:
    narrow = shape.model_copy(update={"kv_heads": 1, "head_dim": 16, "heads": shape.hidden // 16})
    check_precision("int4", narrow)
    check_precision("int8", narrow, reverse=True)
    with pytest.raises(InvalidRecipe, match="32 output features; k_proj has 16; use int8, or estimator replay"):
        check_precision("int4", narrow, reverse=True)
