"""Compiled exact-gradient steps: every architecture against autograd, quantized weights, prefix, lengths and files."""

import copy

import numpy as np
import pytest
import torch

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.export.network import QuantizedBase
from server.compiler.export.weights import write_weights
from server.compiler.model.rounding import ROWS, SCHEMES, dequantize, quantized
from shared.canonical import file_sha256
from shared.recipe import TARGETS, directions_at_once
from shared.zo.noise import direction, query_seeds
from tests.server.compiler import reference
from tests.server.compiler.checks import check_split
from tests.server.compiler.conftest import VOCABULARY, make_tiny

LR = 0.01

# Each of these compiles a program; `make test` holds the uncompiled step to autograd in methods/test_gradient.py, and
# runs one that is compiled in tests/device_agent/training/test_checkpointed_trainer.py.
pytestmark = pytest.mark.slow


MOMENTUM = {"estimator": "gradient", "optimizer": "momentum"}
UNBOUNDED = (LR, np.inf, 0.0)  # the rate, the largest norm and the weight decay of a step


def gradient_of(program, batch):
    """Some B and the program's gradient there: from zero moments, momentum's first velocity is the gradient itself."""
    flat = program.load_some_b()
    program.step(batch, *UNBOUNDED)
    return flat, program("state")[0][program.manifest.size :]


def check_gradient(program, base, batch):
    """The program's gradient is autograd's on the stock model."""
    flat, gradient = gradient_of(program, batch)
    _, expected = reference.gradient(base.model, program.manifest.recipe, program.manifest.shape, flat, batch)
    assert np.linalg.norm(gradient - expected) / np.linalg.norm(expected) < 1e-5


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("deep"), seed=2, num_hidden_layers=3, tie_word_embeddings=True)


@pytest.fixture
def suffix_program(deep, programs):
    return programs(deep, **MOMENTUM, layers="last:2", targets=TARGETS, loss="candidates")


def test_prefix_and_suffix_are_step_to_the_bit(suffix_program):
    rng = np.random.default_rng(8)
    batches = [reference.random_batch(rng, suffix_program.manifest.recipe, VOCABULARY) for _ in range(3)]
    check_split(suffix_program, batches, [(LR, 1.0, 0.1)] * 3)


def test_prefix_and_score_suffix_are_score_to_the_bit(suffix_program):
    recipe = suffix_program.manifest.recipe
    batch = reference.random_batch(np.random.default_rng(8), recipe, VOCABULARY)
    suffix_program.load_some_b()
    choices = np.arange(recipe.rows * recipe.answer_length * recipe.choices, dtype=np.int64) % VOCABULARY
    cells = (batch.positions, choices.reshape(recipe.rows, recipe.answer_length, recipe.choices))
    (hidden,) = suffix_program("prefix", batch.tokens)
    np.testing.assert_array_equal(
        suffix_program("score_suffix", hidden, *cells)[0], suffix_program("score", batch.tokens, *cells)[0]
    )


def test_micro_batches_share_packed_weights_and_bound_the_memory(suffix_program, deep, programs):
    """Two micro-batches of two examples against a program of two examples."""
    settings = {"layers": "last:2", "targets": TARGETS, "loss": "candidates", "effective_batch": 4, "micro_batch": 2}
    parts = programs(deep, **MOMENTUM, **settings)
    check_gradient(parts, deep, reference.random_batch(np.random.default_rng(7), parts.manifest.recipe, VOCABULARY))
    assert parts.manifest.delegates == suffix_program.manifest.delegates
    assert parts.manifest.planned_bytes < 1.5 * suffix_program.manifest.planned_bytes


def test_a_loop_over_directions_projects_the_gradient(programs, deep):
    """Too many to draw at once, and a prime number; the update is also their replay in NumPy, bit for bit."""
    settings = {"estimator": "directional", "optimizer": "sgd", "queries": 509, "targets": TARGETS, "rank": 16}
    program = programs(deep, **settings)
    recipe, size = program.manifest.recipe, program.manifest.size
    assert directions_at_once(recipe.queries, size, looped=True) < recipe.queries
    batch, seeds = reference.random_batch(np.random.default_rng(7), recipe, VOCABULARY), query_seeds(3, 1, 509)
    flat = program.load_some_b()
    _, gradient = reference.gradient(deep.model, recipe, program.manifest.shape, flat, batch)
    _, coefficients = program.step(batch, seeds, LR, 0.0)
    z = np.stack([direction("rademacher", (int(k0), int(k1)), size) for k0, k1 in seeds])
    bound = 1e-5 * LR / 509 * np.linalg.norm(gradient) * np.sqrt(size)
    np.testing.assert_allclose(coefficients, z @ gradient * LR / 509, rtol=0, atol=bound)
    for factor, row in zip(coefficients, z, strict=True):
        flat = flat - factor * row
    np.testing.assert_array_equal(program("adapter")[0], flat)
    program("load", np.zeros(size, np.float32))
    program("replay", seeds, coefficients)
    replayed = np.zeros(size, np.float32)
    for factor, row in zip(coefficients, z, strict=True):
        replayed = replayed - factor * row
    np.testing.assert_array_equal(program("adapter")[0], replayed)


def weights_sha256(base, precision, path):
    """Of the weights file as the base alone makes it, whatever the recipe."""
    write_weights(QuantizedBase.of(load_checkpoint(str(base.directory)), precision).stored, path)
    return file_sha256(path)


# Of the gradient with that of the same rounded model, whose activations and gradients are float32.
COSINES = {"int8": 0.99, "int4": 0.97}


@pytest.mark.parametrize("precision", COSINES)
def test_quantized_gradients_have_the_direction_of_the_rounded_models(programs, tmp_path, precision):
    base = make_tiny(tmp_path / "wide", seed=4, intermediate_size=64, num_key_value_heads=4, tie_word_embeddings=True)
    program = programs(base, **MOMENTUM, precision=precision, loss="full", targets=TARGETS)
    manifest, model = program.manifest, copy.deepcopy(base.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                scheme = SCHEMES[precision] if "layers" in name else ROWS
                parameter.copy_(dequantize(*quantized(name, parameter, scheme).values()))
    batch = reference.random_batch(np.random.default_rng(7), manifest.recipe, VOCABULARY)
    flat, gradient = gradient_of(program, batch)
    _, expected = reference.gradient(model, manifest.recipe, manifest.shape, flat, batch)
    assert gradient @ expected / np.linalg.norm(gradient) / np.linalg.norm(expected) > COSINES[precision]
    assert abs(np.linalg.norm(gradient) / np.linalg.norm(expected) - 1) < 0.1
    assert manifest.file("weights").sha256 == weights_sha256(base, precision, tmp_path / "weights.ptd")
