"""Baselines are the same algorithm, or timing against them says nothing: equal losses on the same seeds."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from shared.recipe import DEFAULT_EPS, BaseRef, Recipe
from shared.zo.noise import query_seeds
from tests.server.compiler.conftest import TinyBase, make_tiny

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from bench.baselines.mezo_program import Passes, emit_passes
    from bench.baselines.mobizo_eager import EagerMobizo
    from bench.programs import Compiled
    from bench.timing import LR, Stepper, random_batch
    from server.compiler import compile_program, inspect_base

pytestmark = pytest.mark.filterwarnings("ignore:::executorch", "ignore:::torch", "ignore:::copyreg")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def program(base: TinyBase, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    sha256 = inspect_base(str(base.directory)).sha256
    recipe = Recipe(
        base=BaseRef(name="tiny", sha256=sha256),
        queries=3,
        effective_batch=2,
        sequence_length=12,
        answer_length=1,
        choices=2,
        loss="candidates",
        rank=4,
    )
    directory = tmp_path_factory.mktemp("program")
    return Compiled(compile_program(recipe, str(base.directory), directory, inference=False), directory, 0.0)


def test_sequential_mezo_is_mobizo_one_path_at_a_time(base: TinyBase, program: Compiled, tmp_path: Path) -> None:
    recipe = program.manifest.recipe
    path, weights = tmp_path / "sequential.pte", program.path("weights")
    emit_passes(recipe, str(base.directory), weights, path, "sequential")
    sequential = Passes(recipe, program.manifest.size, path, weights, "sequential")
    parallel = Stepper(program, 12)
    for number in range(3):
        losses, _ = sequential.step(
            random_batch(recipe, program.manifest.shape.vocabulary, 12, number),
            query_seeds(0, number, recipe.queries),
            LR,
            DEFAULT_EPS["fp32"],
        )
        np.testing.assert_allclose(losses, parallel(number), rtol=1e-5)


def test_eager_mobizo_gives_the_programs_losses(base: TinyBase, program: Compiled) -> None:
    recipe = program.manifest.recipe
    eager = EagerMobizo(base.model, recipe, program.manifest.shape)
    stepper = Stepper(program, 12)
    for number in range(3):
        losses, _ = eager.step(
            random_batch(recipe, program.manifest.shape.vocabulary, 12, number),
            query_seeds(0, number, recipe.queries),
            LR,
            DEFAULT_EPS["fp32"],
        )
        np.testing.assert_allclose(stepper(number), losses.numpy(), rtol=1e-5)
