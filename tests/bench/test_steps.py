"""Baselines of a step: one path at a time, in PyTorch and in ExecuTorch, gives the losses of all at once."""

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from shared.recipe import Recipe
from shared.zo.lora import BaseShape, flat_size
from shared.zo.noise import query_seeds
from tests.server.compiler.conftest import TinyBase, make_tiny

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from bench.baselines.adapted import AdaptedModel
    from bench.baselines.mezo_program import SequentialMezo, emit_sequential
    from bench.baselines.steps import EagerMobizo
    from bench.programs import random_batch
    from server.compiler.checkpoints.checkpoint import inspect_base, load_checkpoint
    from server.compiler.export.backends.xnnpack import Xnnpack
    from server.compiler.export.network import QuantizedBase

pytestmark = pytest.mark.filterwarnings("ignore:::executorch", "ignore:::torch", "ignore:::copyreg")

LR, EPS, QUERIES, LENGTH = 1e-3, 1e-2, 3, 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("base"))


@dataclass(frozen=True)
class Setting:
    """A step of three queries on the tiny base."""

    recipe: Recipe
    shape: BaseShape

    @property
    def parts(self) -> tuple[Recipe, BaseShape]:
        return self.recipe, self.shape

    def inputs(self, number: int) -> tuple[tuple[np.ndarray, ...], np.ndarray, float, float]:
        """Batch, seeds, lr and eps, as every zeroth-order `step` takes them."""
        batch = random_batch(self.recipe, self.shape.vocabulary, LENGTH, number)
        return batch, query_seeds(0, number, QUERIES), LR, EPS


@pytest.fixture(scope="module")
def setting(base: TinyBase) -> Setting:
    answers = {"answer_length": 1, "choices": 2, "loss": "candidates"}
    recipe = base.recipe(queries=QUERIES, effective_batch=2, sequence_length=LENGTH, **answers)
    return Setting(recipe, inspect_base(str(base.directory)))


@pytest.fixture(scope="module")
def reference(base: TinyBase, setting: Setting) -> list[np.ndarray]:
    """Losses of three steps, all paths at once."""
    mobizo = EagerMobizo(AdaptedModel(copy.deepcopy(base.model), *setting.parts), 2 * QUERIES)
    return [mobizo.step(*setting.inputs(number))[0].numpy() for number in range(3)]


def test_one_path_at_a_time_in_pytorch_gives_the_same_losses(
    base: TinyBase, setting: Setting, reference: list[np.ndarray]
) -> None:
    mezo = EagerMobizo(AdaptedModel(copy.deepcopy(base.model), *setting.parts), paths_at_once=1)
    for number, losses in enumerate(reference):
        np.testing.assert_allclose(mezo.step(*setting.inputs(number))[0].numpy(), losses, rtol=1e-5)


def test_one_path_at_a_time_in_executorch_gives_the_same_losses(
    base: TinyBase, setting: Setting, reference: list[np.ndarray], tmp_path: Path
) -> None:
    (recipe, shape), path, weights = setting.parts, tmp_path / "sequential.pte", tmp_path / "weights.ptd"
    Xnnpack().write_weights(QuantizedBase.of(load_checkpoint(str(base.directory)), "fp32").stored, weights)
    emit_sequential(recipe, str(base.directory), path)
    mezo = SequentialMezo(recipe, flat_size(recipe, shape), path, weights)
    for number, losses in enumerate(reference):
        np.testing.assert_allclose(mezo.step(*setting.inputs(number))[0], losses, rtol=1e-5)
    mezo.reset()
    np.testing.assert_allclose(mezo.step(*setting.inputs(0))[0], reference[0], rtol=1e-5)
