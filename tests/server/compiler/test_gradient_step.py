"""Compiled exact-gradient steps: every architecture against autograd, quantized weights, prefix, lengths and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.export.network import QuantizedBase
from server.compiler.export.weights import write_weights
from shared.canonical import file_sha256
from shared.program import ProgramManifest
from shared.recipe import TARGETS, Precision, Recipe
from tests.programs import ProgramStore
from tests.server.compiler import reference
from tests.server.compiler.conftest import ADAPTED, CONFIGS, VOCABULARY, Architectures, Program, TinyBase, make_tiny

LR = 0.01

# Each of these compiles a program; `make test` holds one compiled gradient to autograd's in
# tests/device_agent/runtimes/test_gradient.py, whose program other tests need too.
pytestmark = pytest.mark.slow


def one(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def labels_of(recipe: Recipe, batch: reference.Batch) -> tuple[np.ndarray, ...]:
    return (batch.choices[..., 0],) if recipe.loss == "full" else (batch.choices, batch.choice_mask)


def call_step(program: Program, batch: reference.Batch, lr: float = LR, max_norm: float = np.inf) -> list[np.ndarray]:
    labels = labels_of(program.manifest.recipe, batch)
    scalars = one(lr), one(max_norm), one(0.0)
    return program("step", batch.tokens, batch.positions, *labels, batch.mask, *scalars)


def some_b(manifest: ProgramManifest) -> np.ndarray:
    return (0.1 * np.random.default_rng(9).standard_normal(manifest.size)).astype(np.float32)


def gradient_of(program: Program, batch: reference.Batch) -> np.ndarray:
    """The program's gradient at some B: from zero moments, momentum's first velocity is the gradient itself."""
    program("load", some_b(program.manifest))
    call_step(program, batch)
    return program("state")[0][program.manifest.size :]


class GradientPrograms:
    """Compiled programs of estimator `gradient` with momentum, by their settings."""

    def __init__(self, directory: Path, store: ProgramStore) -> None:
        self._directory, self._store = directory, store
        self._loaded: dict[str, Program] = {}

    def __call__(self, base: TinyBase, **settings: Any) -> Program:
        recipe = base.recipe(**({"estimator": "gradient", "optimizer": "momentum"} | settings))
        if recipe.id not in self._loaded:
            directory = self._directory / recipe.id
            self._loaded[recipe.id] = Program(directory, self._store.put(recipe, base.directory, directory, False))
        return self._loaded[recipe.id]


@pytest.fixture(scope="session")
def gradients(tmp_path_factory: pytest.TempPathFactory, program_store: ProgramStore) -> GradientPrograms:
    return GradientPrograms(tmp_path_factory.mktemp("gradients"), program_store)


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("deep"), seed=2, num_hidden_layers=3, tie_word_embeddings=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_compiled_gradient_is_autograds(
    architectures: Architectures, gradients: GradientPrograms, name: str
) -> None:
    base = architectures.base(name)
    loss = "candidates" if name in ("qwen2", "opt") else "full"
    program = gradients(base, **ADAPTED[name], loss=loss)
    manifest = program.manifest
    batch = reference.random_batch(np.random.default_rng(7), manifest.recipe, VOCABULARY)
    flat = some_b(manifest)
    expected_loss, expected = reference.gradient(base.model, manifest.recipe, manifest.shape, flat, batch)
    found = gradient_of(program, batch)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-5
    np.testing.assert_allclose(program("adapter")[0], flat - LR * found, rtol=0, atol=1e-7)
    program("load", flat)
    loss_before, norm = call_step(program, batch)
    np.testing.assert_allclose(loss_before, [expected_loss], rtol=1e-5)
    np.testing.assert_allclose(norm, [np.linalg.norm(expected)], rtol=1e-5)


@pytest.fixture(scope="session")
def suffixed(deep: TinyBase, gradients: GradientPrograms) -> Program:
    return gradients(deep, layers="last:2", targets=TARGETS, loss="candidates")


def test_prefix_and_suffix_are_step_to_the_bit(suffixed: Program) -> None:
    recipe, rng = suffixed.manifest.recipe, np.random.default_rng(8)
    batches = [reference.random_batch(rng, recipe, VOCABULARY) for _ in range(3)]

    def run(split: bool) -> list[np.ndarray]:
        suffixed("load", some_b(suffixed.manifest))
        found = []
        for batch in batches:
            if split:
                (hidden,) = suffixed("prefix", batch.tokens)
                inputs = hidden, batch.positions, *labels_of(recipe, batch), batch.mask
                found += suffixed("suffix", *inputs, one(LR), one(1.0), one(0.1))
            else:
                inputs = batch.tokens, batch.positions, *labels_of(recipe, batch), batch.mask
                found += suffixed("step", *inputs, one(LR), one(1.0), one(0.1))
        return [*found, *suffixed("state")]

    for whole, split in zip(run(split=False), run(split=True), strict=True):
        np.testing.assert_array_equal(split, whole)


def test_shorter_sequences_have_the_same_gradient(suffixed: Program, deep: TinyBase) -> None:
    manifest, rng = suffixed.manifest, np.random.default_rng(4)
    for length in (3, 7):
        batch = reference.random_batch(rng, manifest.recipe.model_copy(update={"sequence_length": length}), VOCABULARY)
        _, expected = reference.gradient(deep.model, manifest.recipe, manifest.shape, some_b(manifest), batch)
        found = gradient_of(suffixed, batch)
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-5


def test_a_run_goes_on_from_its_state_to_the_bit(suffixed: Program) -> None:
    rng = np.random.default_rng(6)
    batches = [reference.random_batch(rng, suffixed.manifest.recipe, VOCABULARY) for _ in range(4)]
    suffixed("load", some_b(suffixed.manifest))
    for batch in batches[:2]:
        call_step(suffixed, batch)
    (kept,) = suffixed("state")
    for batch in batches[2:]:
        call_step(suffixed, batch)
    (expected,) = suffixed("state")
    suffixed("restore", kept)
    for batch in batches[2:]:
        call_step(suffixed, batch)
    np.testing.assert_array_equal(suffixed("state")[0], expected)


def test_b_begins_at_zero_with_zero_moments(suffixed: Program) -> None:
    fresh = Program(suffixed.directory, suffixed.manifest)
    assert not fresh("state")[0].any()
    assert fresh("state")[0].shape == (2 * suffixed.manifest.size,)


def test_the_loss_falls(suffixed: Program) -> None:
    batch = reference.random_batch(np.random.default_rng(1), suffixed.manifest.recipe, VOCABULARY)
    suffixed("load", np.zeros(suffixed.manifest.size, np.float32))
    losses = [float(call_step(suffixed, batch, lr=0.1, max_norm=1.0)[0][0]) for _ in range(10)]
    assert losses[-1] < 0.7 * losses[0]


def test_micro_batches_share_packed_weights_and_bound_the_memory(
    suffixed: Program, deep: TinyBase, gradients: GradientPrograms
) -> None:
    """Three micro-batches of two examples against a program of two examples."""
    parts = gradients(deep, layers="last:2", targets=TARGETS, loss="candidates", effective_batch=6, micro_batch=2)
    manifest = parts.manifest
    batch = reference.random_batch(np.random.default_rng(7), manifest.recipe, VOCABULARY)
    _, expected = reference.gradient(deep.model, manifest.recipe, manifest.shape, some_b(manifest), batch)
    found = gradient_of(parts, batch)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-5
    assert manifest.delegates == suffixed.manifest.delegates
    assert manifest.planned_bytes < 1.5 * suffixed.manifest.planned_bytes


def weights_sha256(base: TinyBase, precision: Precision, path: Path) -> str:
    """Of the weights file as the base alone makes it, whatever the recipe."""
    write_weights(QuantizedBase.of(load_checkpoint(str(base.directory)), precision).stored(), path)
    return file_sha256(path)


def test_the_weights_file_is_the_same_to_the_byte(suffixed: Program, deep: TinyBase, tmp_path: Path) -> None:
    assert suffixed.manifest.file("weights").sha256 == weights_sha256(deep, "fp32", tmp_path / "weights.ptd")


@pytest.mark.parametrize(("precision", "loss"), [("int8", "full"), ("int8-weight", "candidates")])
def test_quantized_gradients_have_the_direction_of_float32s(
    tmp_path_factory: pytest.TempPathFactory,
    gradients: GradientPrograms,
    tmp_path: Path,
    precision: Precision,
    loss: str,
) -> None:
    base = make_tiny(
        tmp_path_factory.mktemp("wide"), seed=4, intermediate_size=64, num_hidden_layers=1, tie_word_embeddings=True
    )
    program = gradients(base, precision=precision, loss=loss, targets=TARGETS)
    manifest = program.manifest
    batch = reference.random_batch(np.random.default_rng(7), manifest.recipe, VOCABULARY)
    _, expected = reference.gradient(base.model, manifest.recipe, manifest.shape, some_b(manifest), batch)
    found = gradient_of(program, batch)
    assert found @ expected / np.linalg.norm(found) / np.linalg.norm(expected) > 0.99
    assert abs(np.linalg.norm(found) / np.linalg.norm(expected) - 1) < 0.1
    assert manifest.file("weights").sha256 == weights_sha256(base, precision, tmp_path / "weights.ptd")
