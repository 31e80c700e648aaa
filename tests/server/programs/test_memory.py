"""What a compile is thought to take, against what compiles were measured to take; and what a machine may give."""

import psutil
import pytest

from server.compiler.cost import compile_bytes
from server.tasks.worker import machine_bytes
from shared.recipe import TARGETS, Recipe
from tests.server.jobs.test_memory import SMOLLM2

SMOLLM2_PARAMETERS = 134_515_008
TINYLLAMA = SMOLLM2.model_copy(
    update={"layers": 22, "hidden": 2048, "intermediate": 5632, "heads": 32, "kv_heads": 4, "vocabulary": 32000}
)
TINYLLAMA_PARAMETERS = 1_100_048_384


def recipe(**settings):
    return Recipe(base={"name": "x", "sha256": "b" * 64}, answer_length=1, choices=2, **settings)


@pytest.mark.parametrize(
    ("shape", "parameters", "settings", "expected"),
    [
        (SMOLLM2, SMOLLM2_PARAMETERS, {}, 912_814_080),
        (SMOLLM2, SMOLLM2_PARAMETERS, {"rank": 64, "queries": 8, "targets": TARGETS}, 1_439_617_024),
        (TINYLLAMA, TINYLLAMA_PARAMETERS, {"precision": "int8"}, 889_344_000),
    ],
)
def test_estimates_are_near_what_was_measured(shape, parameters, settings, expected):
    """The compiler's peak resident bytes: SmolLM2-135M as GGUF, and random bfloat16 weights in safetensors; XNNPACK."""
    assert compile_bytes(recipe(**settings), shape, parameters) == pytest.approx(expected, rel=0.2)


def test_a_container_has_what_it_is_given(tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text("1000000\n")
    assert machine_bytes((str(tmp_path / "none"), str(limit))) == 1_000_000
    limit.write_text("max\n")
    assert machine_bytes((str(limit),)) == psutil.virtual_memory().total
