"""Exact gradients by the native runner, whose methods share packed weights, and by ExecuTorch's Python runtime."""

import warnings

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from device_agent.executors.program import Rates
from device_agent.executors.python import open_program
from shared.zo.encoding import pack_score, pack_step
from tests.device_agent.conftest import VOCABULARY
from tests.device_agent.native import opened_by_runner
from tests.server.compiler import reference

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
    examples = program.splits(dataset, program.plan(dataset).training).train
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
    inprocess = open_program(program.manifest, program.path("program"), program.path("weights"))
    expected = run(inprocess, program, dataset)
    inprocess.close()
    runtime = opened_by_runner(program.manifest, runner_directory, program.path("program"), program.path("weights"))
    shared = run(runtime, program, dataset)
    runtime.close()
    for one, other in zip(shared, expected, strict=True):
        assert np.linalg.norm(one - other) <= TOLERANCE[program.manifest.recipe.precision] * np.linalg.norm(other)


def test_a_state_is_restored_to_the_bit(program, dataset):
    runtime = open_program(program.manifest, program.path("program"), program.path("weights"))
    batch, _ = batch_of(program, dataset)
    runtime.gradient_step(batch, RATES)
    state = runtime.state()
    np.testing.assert_array_equal(state[: program.manifest.size], runtime.adapter())
    runtime.gradient_step(batch, RATES)
    after = runtime.state()
    runtime.restore(state)
    runtime.gradient_step(batch, RATES)
    np.testing.assert_array_equal(runtime.state(), after)
    runtime.load(state[: program.manifest.size])
    assert not runtime.state()[program.manifest.size :].any()
    runtime.close()


def test_the_compiled_gradient_is_autograds(gradient, rademacher, base):
    """From zero moments, Adam's first moment is a tenth of the gradient. Its weights file is that of every recipe."""
    manifest, rng = gradient.manifest, np.random.default_rng(7)
    flat = (0.1 * rng.standard_normal(manifest.size)).astype(np.float32)
    batch = reference.random_batch(rng, manifest.recipe, VOCABULARY)
    with warnings.catch_warnings():  # transformers warns of its own deprecations
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base)
    expected_loss, expected = reference.gradient(model, manifest.recipe, manifest.shape, flat, batch)
    runtime = open_program(manifest, gradient.path("program"), gradient.path("weights"))
    runtime.load(flat)
    inputs = batch.tokens, batch.positions, batch.choices, batch.choice_mask, batch.mask
    loss, norm = runtime.gradient_step(inputs, Rates(lr=0.01))
    actual = 10 * runtime.state()[manifest.size : 2 * manifest.size]
    runtime.close()
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) < 1e-5
    np.testing.assert_allclose(np.concatenate((loss, norm)), [expected_loss, np.linalg.norm(expected)], rtol=1e-5)
    assert manifest.file("weights").sha256 == rademacher.manifest.file("weights").sha256
