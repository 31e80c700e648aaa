"""The step grid: all ways to run a contender give equal losses; cells are kept, limited and complete."""

import copy
import itertools
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from shared.recipe import Recipe
from shared.zo.lora import BaseShape, flat_size
from shared.zo.noise import query_seeds, rademacher
from tests.programs import shared_store
from tests.server.compiler.conftest import TinyBase, make_tiny

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from bench.baselines.adapted import AdaptedModel
    from bench.baselines.mezo_program import Passes, emit_passes
    from bench.baselines.steps import EagerMobizo, FirstOrder, FullFirstOrder, FullMezo, Grouping, passes, torch_noise
    from bench.padding import padding_shares, sequence_lengths
    from bench.programs import CompiledProgram, random_batch
    from bench.step import grid, memory
    from bench.step.grid import Workspace, grid_claims, measure, measure_grid, open_workspace
    from bench.step.process import Cell, Contender, Extent, ProcessTask, cells
    from bench.step.process import measure as measure_here
    from bench.step.reverse import LastLayer, products_over_forward, reverse_over_forward
    from bench.tiny import write_base
    from server.compiler.checkpoints.checkpoint import load_checkpoint
    from server.compiler.export.backends.xnnpack import Xnnpack
    from server.compiler.export.network import QuantizedBase

pytestmark = pytest.mark.filterwarnings("ignore:::executorch", "ignore:::torch", "ignore:::copyreg")

LR, EPS, QUERIES = 1e-3, 1e-2, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def workspace(base: TinyBase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    # What else runs on this machine may take all its memory.
    with (
        pytest.MonkeyPatch.context() as patch,
        open_workspace(tmp_path_factory.mktemp("keep"), base.directory) as opened_workspace,
    ):
        patch.setattr(grid, "SPARE_BYTES", 0)
        yield opened_workspace


def _cell(**settings: Any) -> Cell:
    defaults: dict[str, Any] = {"contender": Contender.MOBIZO, "engine": "eager", "length": 8, "batch": 2, "queries": 2}
    return Cell(**(defaults | settings))


def _process_task(workspace: Workspace, cell: Cell, **settings: Any) -> ProcessTask:
    base_fields = {"source": workspace.source, "base": workspace.base, "shape": workspace.shape}
    return ProcessTask(action="measure", cell=cell, **(base_fields | settings))


@dataclass(frozen=True)
class Setting:
    """A step of three queries on the tiny base."""

    process_task: ProcessTask

    @property
    def parts(self) -> tuple[Recipe, BaseShape]:
        return self.process_task.cell.recipe(self.process_task.base), self.process_task.shape

    def inputs(self, number: int) -> tuple[tuple[np.ndarray, ...], np.ndarray, float, float]:
        """Batch, seeds, lr and eps, as every zeroth-order `step` takes them."""
        cell = self.process_task.cell
        batch = random_batch(self.parts[0], self.process_task.shape.vocabulary, cell.length, number)
        return batch, query_seeds(0, number, QUERIES), LR, EPS


@pytest.fixture(scope="module")
def setting(workspace: Workspace) -> Setting:
    return Setting(_process_task(workspace, _cell(queries=QUERIES, batch=6, length=12)))


@pytest.fixture(scope="module")
def reference(base: TinyBase, setting: Setting) -> list[np.ndarray]:
    """Losses of three steps, all paths in one pass."""
    mobizo = EagerMobizo(AdaptedModel(copy.deepcopy(base.model), *setting.parts))
    return [mobizo.step(*setting.inputs(number))[0].numpy() for number in range(3)]


def test_a_program_gives_the_same_losses(
    base: TinyBase, setting: Setting, reference: list[np.ndarray], tmp_path: Path
) -> None:
    recipe, _ = setting.parts
    recipe = recipe.model_copy(update={"base": base.recipe().base})
    program = CompiledProgram(shared_store().put(recipe, base.directory, tmp_path), tmp_path, 0.0)
    runtime = program.open()
    for number, losses in enumerate(reference):
        np.testing.assert_allclose(runtime.step(*setting.inputs(number))[0], losses, rtol=1e-5)
    runtime.close()


@pytest.mark.parametrize("grouping", ["sequential", "inner", "outer", "both"])
def test_every_path_is_in_one_pass(grouping: Grouping) -> None:
    groups = passes(grouping, 3)
    assert sorted(path for group in groups for path in group) == list(range(6))
    assert len(groups) == {"sequential": 6, "inner": 3, "outer": 2, "both": 1}[grouping]
    if grouping == "inner":
        assert all(minus == plus + 3 for plus, minus in groups)


@pytest.mark.parametrize("grouping", ["sequential", "inner", "outer"])
def test_fewer_paths_a_pass_in_pytorch_give_the_same_losses(
    base: TinyBase, setting: Setting, reference: list[np.ndarray], grouping: Grouping
) -> None:
    mobizo = EagerMobizo(AdaptedModel(copy.deepcopy(base.model), *setting.parts), grouping)
    for number, losses in enumerate(reference):
        np.testing.assert_allclose(mobizo.step(*setting.inputs(number))[0].numpy(), losses, rtol=1e-5)


@pytest.mark.parametrize("grouping", ["inner", "outer"])  # pairs of paths of a query, and paths of one sign
def test_fewer_paths_a_pass_in_executorch_give_the_same_losses(
    base: TinyBase, setting: Setting, reference: list[np.ndarray], grouping: Grouping, tmp_path: Path
) -> None:
    (recipe, shape), path, weights = setting.parts, tmp_path / "passes.pte", tmp_path / "weights.ptd"
    Xnnpack().write_weights(QuantizedBase.of(load_checkpoint(str(base.directory)), "fp32").stored, weights)
    emit_passes(recipe, str(base.directory), path, grouping)
    program_passes = Passes(recipe, flat_size(recipe, shape), path, weights, grouping)
    for number, losses in enumerate(reference):
        np.testing.assert_allclose(program_passes.step(*setting.inputs(number))[0], losses, rtol=1e-5)
    program_passes.reset()
    np.testing.assert_allclose(program_passes.step(*setting.inputs(0))[0], reference[0], rtol=1e-5)


def test_mezo_on_all_parameters_is_its_formula(base: TinyBase, setting: Setting) -> None:
    """Against parameters perturbed out of place, in float64: losses, coefficients and the parameters afterwards."""
    model = copy.deepcopy(base.model).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    mezo = FullMezo(model, *setting.parts)
    adapted = mezo.adapted
    batch, seeds, lr, eps = setting.inputs(0)
    losses, coefficients = mezo.step(batch, seeds, lr, eps)
    after = [parameter.detach().clone() for parameter in model.parameters()]
    generators = [torch_noise((int(k0), int(k1))) for k0, k1 in seeds]
    noise = [[draw(parameter) for parameter in before] for draw in generators]
    expected = list(before)
    for sign, side in ((1, losses[:3]), (-1, losses[3:])):
        for z, loss in zip(noise, side, strict=True):
            _assign(
                model, [parameter + sign * eps * noise_part for parameter, noise_part in zip(before, z, strict=True)]
            )
            with torch.no_grad():
                assert float(loss) == pytest.approx(
                    float(adapted.losses(batch, adapted.zeros().unsqueeze(0))), rel=1e-6
                )
    for z, plus, minus in zip(noise, losses[:3].tolist(), losses[3:].tolist(), strict=True):
        coefficient = lr / 3 * (plus - minus) / (2 * eps)
        expected = [parameter - coefficient * noise_part for parameter, noise_part in zip(expected, z, strict=True)]
    for actual, value in zip(after, expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=0, atol=1e-6)
    assert coefficients.abs().max() > 0


def _assign(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


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


def test_the_gradient_of_all_parameters_is_its_finite_differences(base: TinyBase, setting: Setting) -> None:
    batch, *_ = setting.inputs(0)
    model = copy.deepcopy(base.model).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    first = FullFirstOrder(model, *setting.parts)
    loss = first.step(batch, LR)
    gradients = [parameter.grad.clone() for parameter in first.parameters]
    for parameter, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), old - LR * gradient)
    for seed in range(4):
        draw = torch_noise((seed, 1))
        z = [draw(parameter) for parameter in before]
        losses = []
        for step in (0.0, 1e-3, -1e-3):
            _assign(model, [old + step * noise_part for old, noise_part in zip(before, z, strict=True)])
            with torch.no_grad():
                losses.append(float(first.adapted.losses(batch, first.adapted.zeros().unsqueeze(0))))
        slope = sum(float((gradient * noise_part).sum()) for gradient, noise_part in zip(gradients, z, strict=True))
        assert loss == pytest.approx(losses[0], rel=1e-6)
        assert slope == pytest.approx((losses[1] - losses[2]) / 2e-3, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("contender", list(Contender))
def test_every_contender_makes_steps_in_pytorch(workspace: Workspace, contender: Contender) -> None:
    cell = _cell(contender=contender, queries=1)
    row = measure_here(_process_task(workspace, cell, rounds=2))
    assert len(row["seconds"]) == 2
    assert row["peak_rss_bytes"] >= row["loaded_bytes"] // 2 > 1 << 20


def test_a_cell_is_measured_once_in_a_process_of_its_own(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = _cell(engine="executorch")
    row = measure(cell, workspace, rounds=2, seconds=600)  # a machine that does much else may be slow
    assert len(row["seconds"]) == 2, row
    assert row["peak_rss_bytes"] > 1 << 20
    monkeypatch.setattr(grid, "run", None)
    assert measure(cell, workspace, rounds=2) == row
    # A run whose time is up reads what is kept.
    monkeypatch.setattr(grid, "cells", lambda extent, device: [_cell(length=13), cell])
    rows = measure_grid(workspace, "plain", "cuda", limit=0)
    assert [cell_row.get("skipped") for cell_row in rows] == ["the time limit was reached", None]
    assert rows[1] == row


def test_a_cell_that_takes_too_much_is_ended_and_says_so(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(grid, "SPARE_BYTES", 1 << 60)
        assert measure(_cell(length=10), workspace)["skipped"] == "it needs more memory than the machine has left"
    monkeypatch.setattr(grid, "START_SECONDS", 0.0)
    assert measure(_cell(length=11), workspace, seconds=0.0)["skipped"] == "it did not end within 0 s"


def test_a_cell_that_fails_is_not_kept(workspace: Workspace, tmp_path: Path) -> None:
    absent = Workspace(tmp_path, str(tmp_path / "absent"), workspace.base, workspace.shape)
    assert measure(_cell(), absent)["error"]
    assert not list(tmp_path.glob("cells/*"))


def test_peak_memory_is_of_ours_over_first_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_here(recipe: Recipe, directory: Path, source: Path) -> CompiledProgram:
        manifest = shared_store().put(recipe, source, directory)
        (directory / "manifest.json").write_text(manifest.model_dump_json())
        return CompiledProgram(manifest, directory, 0.0)

    monkeypatch.setattr(memory, "compile_cold", compile_here)
    monkeypatch.setattr(memory, "PRECISIONS", ("fp32",))  # the tiny base is too narrow to be quantized
    arguments = (tmp_path / "keep", tmp_path / "base", 64, 4, 2)
    write_base(tmp_path / "base")
    rows, claims = memory.peak_memory(*arguments)
    first_order, checkpointed, replay, gradient = rows
    assert [row.get("contender") for row in rows[:2]] == [Contender.FO_LORA_FA, Contender.FO_CHECKPOINTING]
    for name, row in (("", replay), ("gradient_", gradient)):
        assert claims[f"{name}peak_memory_vs_first_order"] == row["peak_rss_bytes"] / first_order["peak_rss_bytes"]
    of_checkpointed = gradient["peak_rss_bytes"] / checkpointed["peak_rss_bytes"]
    assert claims["gradient_peak_memory_vs_checkpointed"] == of_checkpointed
    assert replay["peak_rss_bytes"] > replay["weights_bytes"] == gradient["weights_bytes"]
    monkeypatch.setattr(grid, "run", None)
    monkeypatch.setattr(memory, "compile_cold", None)
    assert memory.peak_memory(*arguments) == (rows, claims)


def test_a_reverse_pass_runs_beside_its_forward_pass(base: TinyBase) -> None:
    checkpoint = load_checkpoint(str(base.directory))
    last = LastLayer.of(checkpoint, "fp32", length=16)
    assert reverse_over_forward(last, rounds=2) > 0
    assert products_over_forward(checkpoint, last, rounds=2) > 0


def _row(seconds: float, gigabytes: float, **settings: Any) -> dict[str, Any]:
    cell = _cell(**settings)
    row = {"who": cell.label, **cell.model_dump(mode="json")}
    return row | {"seconds": [seconds], "peak_rss_bytes": int(gigabytes * 1e9)}


def test_what_the_inner_loop_gains_is_claimed_by_engine_and_precision() -> None:
    sizes: dict[str, Any] = {"length": 64, "batch": 1, "queries": 1}
    variants = [{}, {"engine": "executorch"}, {"engine": "executorch", "precision": "int8"}, {"engine": "compile"}]
    rows = [
        _row(seconds, 1.0, contender=contender, **sizes, **variant)
        for number, variant in enumerate(variants, 2)
        for contender, seconds in ((Contender.MEZO_LORA_FA, number), (Contender.INNER, 1.0))
    ]
    claims = grid_claims(rows[:-1])  # no inner loop by torch.compile, so no claim of it
    inner_claims = {name: value for name, value in claims.items() if name.startswith("inner")}
    assert inner_claims == {
        "inner_speedup_eager_s64_b1": 2,
        "inner_speedup_executorch_s64_b1": 3,
        "inner_speedup_executorch_int8_s64_b1": 4,
    }
    assert (claims["grid_cells"], claims["grid_cells_not_measured"]) == (7, 0)


@pytest.mark.parametrize("extent", ["quick", "plain", "full"])
def test_a_grid_holds_every_contender_and_engine_once(extent: Extent) -> None:
    grid_cells = cells(extent)
    assert {cell.contender for cell in grid_cells} == set(Contender)
    assert {cell.engine for cell in grid_cells} == {"eager", "compile", "executorch"}
    assert len({cell.name for cell in grid_cells}) == len(grid_cells)
    assert all(cell.batch % cell.queries == 0 for cell in grid_cells)
    assert set(grid_cells) <= set(cells("full"))


def test_a_grid_on_a_gpu_is_pytorchs() -> None:
    assert {(cell.engine, cell.device) for cell in cells("plain", "cuda")} == {("eager", "cuda"), ("compile", "cuda")}


def test_padding_is_counted_as_in_the_papers_drawing() -> None:
    """fig:padding: eight sequences as one batch of 8, 448 tokens of padding; here every batch of 8 is that one."""
    lengths = np.array([40, 60, 100, 50, 30, 128, 70, 90])
    shares = padding_shares(lengths, draws=50)
    assert shares[8] == pytest.approx(1 - 568 / (8 * 128))
    assert shares[1] == 0
    pairs = [1 - (a + b) / (2 * max(a, b)) for a, b in itertools.combinations(lengths.tolist(), 2)]
    assert padding_shares(lengths, draws=20_000)[2] == pytest.approx(np.mean(pairs), abs=0.005)


def test_lengths_are_of_what_the_network_reads(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_base(tmp_path / "base") / "tokenizer.json"))
    path = tmp_path / "train.jsonl"
    texts = ["dull", "a warm and funny film"]
    path.write_text("".join(json.dumps({"text": text, "label": "positive"}) + "\n" for text in texts))
    # " great" is one token of this tokenizer or several; all but the last one are read.
    expected = [len(tokenizer.encode(f"{text} It was great").ids) - 1 for text in texts]
    assert sequence_lengths(path, "sst2", tokenizer).tolist() == expected
