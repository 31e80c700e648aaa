"""Baselines of a step: all ways to run one give equal losses, gradients are slopes; peak memory; a reverse pass."""

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.recipe import BaseRef, Recipe
from shared.zo.lora import BaseShape, flat_size
from shared.zo.noise import query_seeds, rademacher
from tests.programs import shared_store
from tests.server.compiler.conftest import TinyBase, make_tiny

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from bench.baselines.adapted import AdaptedModel
    from bench.baselines.mezo_program import SequentialMezo, emit_sequential
    from bench.baselines.steps import EagerMobizo, FirstOrder
    from bench.programs import CompiledProgram, random_batch
    from bench.step import memory
    from bench.step.reverse import LastLayer, reverse_over_forward
    from bench.tiny import write_base
    from server.compiler import inspect_base
    from server.compiler.checkpoints.base import locate_base
    from server.compiler.checkpoints.checkpoint import load_checkpoint
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


def test_a_program_gives_the_same_losses(
    base: TinyBase, setting: Setting, reference: list[np.ndarray], tmp_path: Path
) -> None:
    program = CompiledProgram(shared_store().put(setting.recipe, base.directory, tmp_path), tmp_path, 0.0)
    runtime = program.open()
    for number, losses in enumerate(reference):
        np.testing.assert_allclose(runtime.step(*setting.inputs(number))[0], losses, rtol=1e-5)
    runtime.close()


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


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_of_lora_fa_is_its_finite_differences(
    base: TinyBase, setting: Setting, checkpointing: bool
) -> None:
    batch, *_ = setting.inputs(0)
    model = copy.deepcopy(base.model).double()
    first = FirstOrder(model, *setting.parts, checkpointing=checkpointing)
    b = torch.from_numpy(np.random.default_rng(0).normal(0, 0.05, first.adapted.size).astype(np.float32))
    with torch.no_grad():
        first.b.copy_(b)
    _, gradient = first.step(batch, LR)
    np.testing.assert_allclose(first.b.detach().numpy(), b.numpy() - LR * gradient, atol=1e-7)
    other = AdaptedModel(copy.deepcopy(base.model).double(), *setting.parts)
    for seed in range(4):
        z = torch.from_numpy(rademacher((seed, 1), len(b)))
        with torch.no_grad():
            plus, minus = other.losses(batch, torch.stack((b + 1e-3 * z, b - 1e-3 * z))).double().tolist()
        assert float(gradient @ z.numpy()) == pytest.approx((plus - minus) / 2e-3, rel=1e-2, abs=1e-3)


@pytest.fixture
def compile_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs come from the tests' cache; the tiny base is too narrow to be quantized."""

    def compile_cold(recipe: Recipe, directory: Path, source: Path) -> CompiledProgram:
        return CompiledProgram(shared_store().put(recipe, source, directory), directory, 0.0)

    monkeypatch.setattr(memory, "compile_cold", compile_cold)
    monkeypatch.setattr(memory, "PRECISIONS", ("fp32",))


@pytest.mark.usefixtures("compile_here")
def test_peak_memory_is_of_ours_over_first_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter((400, 300, 200, 100))
    monkeypatch.setattr(memory, "run_module", lambda *_: next(peaks))
    arguments = (tmp_path / "keep", write_base(tmp_path / "base"), 64, 4)
    rows, claims = memory.peak_memory(*arguments)
    assert [row["who"] for row in rows[:2]] == ["first order", "first order, checkpointing"]
    assert [row["peak_rss_bytes"] for row in rows] == [400, 300, 200, 100]
    assert claims["peak_memory_vs_first_order"] == 0.5
    assert claims["gradient_peak_memory_vs_first_order"] == 0.25
    assert claims["gradient_peak_memory_vs_checkpointed"] == pytest.approx(1 / 3)
    assert memory.peak_memory(*arguments) == (rows, claims)  # all rows were kept


def test_first_order_and_our_steps_run(base: TinyBase, setting: Setting, tmp_path: Path) -> None:
    memory.train_first_order(str(base.directory), setting.recipe, checkpointing=True)
    home = write_base(tmp_path / "base")
    recipe = setting.recipe.model_copy(
        update={"base": BaseRef(name="tiny", sha256=locate_base(str(home)).sha256), "sequence_length": 64}
    )
    memory.train_and_score(
        CompiledProgram(shared_store().put(recipe, home, tmp_path / "program"), tmp_path / "program")
    )


def test_a_reverse_pass_runs_beside_its_forward_pass(base: TinyBase) -> None:
    checkpoint = load_checkpoint(str(base.directory))
    last = LastLayer.of(checkpoint, "fp32", length=16)
    assert reverse_over_forward(last, rounds=2) > 0
