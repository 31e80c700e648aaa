"""Small, concrete contract objects."""

import pytest

from shared.recipe import BaseRef, Recipe
from shared.zo.lora import BaseShape


@pytest.fixture
def shape():
    return BaseShape(
        architecture="llama",
        layers=2,
        hidden=32,
        intermediate=64,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocabulary=100,
        context_length=128,
    )


@pytest.fixture
def recipe():
    return Recipe(
        base=BaseRef(name="tiny", sha256="ab" * 32),
        rank=4,
        alpha=8,
        targets=("v_proj", "q_proj"),
        queries=2,
        effective_batch=3,
        sequence_length=12,
        answer_length=2,
        choices=3,
    )
