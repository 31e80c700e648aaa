"""Exact gradients by the native runner, whose methods share packed weights, and by ExecuTorch's Python runtime."""

import numpy as np
import pytest

from device_agent.executors.program import Rates
from device_agent.executors.python import open_program
from shared.zo.encoding import pack_score, pack_step
from tests.device_agent.native import opened_by_runner

RATES = Rates(lr=0.05, max_norm=1.0, weight_decay=0.01)
# Relative. An activation that a last bit rounds to the other side of a step of int8 moves a gradient by more.
TOLERANCE = {"fp32": 1e-5, "int8": 5e-2}


@pytest.fixture(scope="session", params=["adam", pytest.param("int8", marks=pytest.mark.slow)])
def program(request):
    """Programs with exact gradients: the trainer's, and one of momentum in int8."""
    if request.param == "adam":
        return request.getfixturevalue("gradient")
    settings = {"precision": "int8", "targets": ("q_proj", "o_proj"), "loss": "candidates", "queries": 1}
    return request.getfixturevalue("compile_tiny")(
        "gradient-int8", estimator="gradient", optimizer="momentum", **settings
    )


def batch_of(program, dataset):
    examples = program.examples(dataset)
    return pack_step(examples[: program.manifest.recipe.effective_batch], program.manifest.recipe), examples


def run(runtime, program, dataset):
    """Steps with scores between them, so that every method's weights are packed: states, losses and scores."""
    batch, examples = batch_of(program, dataset)
    recipe, rng = program.manifest.recipe, np.random.default_rng(1)
    runtime.load(rng.normal(0, 0.1, program.manifest.size).astype(np.float32))
    scored = next(pack_score(examples, recipe)).inputs
    outputs = [runtime.score(scored)]
    for _ in range(2):
        outputs += [*runtime.gradient_step(batch, RATES), runtime.state(), runtime.score(scored)]
    return outputs


def test_the_native_runner_shares_packed_weights_and_gives_the_same(program, dataset, runner_directory):
    """Forward and transposed packings of one tensor lie in one cache, which finds them by name."""
    inprocess = open_program(program.manifest, *program.files)
    expected = run(inprocess, program, dataset)
    inprocess.close()
    runtime = opened_by_runner(program.manifest, runner_directory, *program.files)
    shared = run(runtime, program, dataset)
    runtime.close()
    for one, other in zip(shared, expected, strict=True):
        assert np.linalg.norm(one - other) <= TOLERANCE[program.manifest.recipe.precision] * np.linalg.norm(other)
