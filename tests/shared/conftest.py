"""Small, concrete contract objects."""

import pytest

from shared.program import ProgramFile, ProgramManifest
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


ROLES = {"program": "program.pte", "weights": "weights.ptd", "tokenizer": "tokenizer.json"}


@pytest.fixture
def build(recipe, shape):
    """Returns a program's manifest with files of these roles, and more files."""

    def build(*extra, roles=ROLES):
        return ProgramManifest(
            recipe=recipe,
            recipe_id=recipe.id,
            shape=shape,
            size=384,
            a_sha256="1" * 64,
            score_rows=recipe.score_rows,
            files=[
                ProgramFile(role=role, name=name, size=3, sha256="0" * 64) for role, name in (*roles.items(), *extra)
            ],
            planned_bytes=1,
            flops_per_step=1,
            delegates=1,
            nodes=1,
            executorch="1.5.1",
        )

    return build
