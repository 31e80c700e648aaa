"""The step grid: contenders are one algorithm, whichever way they run; its cells are kept, bounded and laid out."""

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

from shared.lora import BaseShape, flat_size
from shared.noise import query_seeds, rademacher
from shared.recipe import BaseRef, Recipe
from tests.server.compiler.conftest import TinyBase, make_tiny

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from bench import memory, step_command, step_grid
    from bench.baselines.adapted import AdaptedModel
    from bench.baselines.eager import EagerMobizo
    from bench.baselines.first_order import FirstOrder, FullFirstOrder
    from bench.baselines.in_place import VectorMezo, mezo_full, torch_noise
    from bench.baselines.mezo import Passes, emit_passes
    from bench.baselines.passes import Grouping, passes
    from bench.cells import Cell, Contender
    from bench.padding import padding_of, sequence_lengths
    from bench.programs import Compiled
    from bench.step_cell import Asked, random_batch
    from bench.step_cell import measure as measure_here
    from bench.step_cells import Extent, cells
    from bench.step_grid import Place, measure, open_place
    from bench.step_tables import Grid, Machine, floor_seconds, tables_of
    from bench.tiny import write_base
    from server.compiler import compile_program
    from server.compiler.backends.xnnpack import Xnnpack
    from server.compiler.checkpoint import load_checkpoint
    from server.compiler.network import QuantizedBase

pytestmark = pytest.mark.filterwarnings("ignore:::executorch", "ignore:::torch", "ignore:::copyreg")

LR, EPS, QUERIES = 1e-3, 1e-2, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def place(base: TinyBase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    # What else runs on this machine may take all its memory.
    with pytest.MonkeyPatch.context() as patch, open_place(tmp_path_factory.mktemp("keep"), base.directory) as found:
        patch.setattr(step_grid, "SPARE_BYTES", 0)
        yield found


def _cell(**settings: Any) -> Cell:
    few: dict[str, Any] = {"contender": Contender.MOBIZO, "engine": "eager", "length": 8, "batch": 2, "queries": 2}
    return Cell(**(few | settings))


def _asked(place: Place, cell: Cell, **settings: Any) -> Asked:
    known = {"source": place.source, "base": place.base, "shape": place.shape, "model": str(place.model)}
    return Asked(what="measure", cell=cell, **(known | settings))


@dataclass(frozen=True)
class Setting:
    """A step of three queries on the tiny base."""

    asked: Asked

    @property
    def parts(self) -> tuple[Recipe, BaseShape]:
        return self.asked.cell.recipe(self.asked.base), self.asked.shape

    def inputs(self, number: int) -> tuple[tuple[np.ndarray, ...], np.ndarray, float, float]:
        """Batch, seeds, lr and eps, as every zeroth-order `step` takes them."""
        return random_batch(self.asked, number), query_seeds(0, number, QUERIES), LR, EPS


@pytest.fixture(scope="module")
def setting(place: Place) -> Setting:
    return Setting(_asked(place, _cell(queries=QUERIES, batch=6, length=12)))


@pytest.fixture(scope="module")
def reference(base: TinyBase, setting: Setting) -> list[np.ndarray]:
    """Losses of three steps, all paths in one pass: what tests/bench/test_baselines.py holds to a program's."""
    mobizo = EagerMobizo(copy.deepcopy(base.model), *setting.parts)
    return [mobizo.step(*setting.inputs(number))[0].numpy() for number in range(3)]


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
    mobizo = EagerMobizo(copy.deepcopy(base.model), *setting.parts, grouping)
    for number, losses in enumerate(reference):
        np.testing.assert_allclose(mobizo.step(*setting.inputs(number))[0].numpy(), losses, rtol=1e-5)


@pytest.mark.parametrize("grouping", ["inner", "outer"])
def test_fewer_paths_a_pass_in_executorch_give_the_same_losses(
    base: TinyBase, setting: Setting, reference: list[np.ndarray], grouping: Grouping, tmp_path: Path
) -> None:
    (recipe, shape), path, weights = setting.parts, tmp_path / "passes.pte", tmp_path / "weights.ptd"
    Xnnpack().write_weights(QuantizedBase.of(load_checkpoint(str(base.directory)), "fp32").stored(), weights)
    emit_passes(recipe, str(base.directory), weights, path, grouping)
    found = Passes(recipe, flat_size(recipe, shape), path, weights, grouping)
    for number, losses in enumerate(reference):
        np.testing.assert_allclose(found.step(*setting.inputs(number))[0], losses, rtol=1e-5)
    found.reset()
    np.testing.assert_allclose(found.step(*setting.inputs(0))[0], reference[0], rtol=1e-5)


def test_mezo_in_place_gives_the_same_losses(base: TinyBase, setting: Setting, reference: list[np.ndarray]) -> None:
    adapted = AdaptedModel(copy.deepcopy(base.model), *setting.parts)
    mezo = VectorMezo(adapted, adapted.zeros())
    for number, losses in enumerate(reference):
        np.testing.assert_allclose(mezo.step(*setting.inputs(number))[0].numpy(), losses, rtol=1e-4)


def test_mezo_on_all_parameters_is_its_formula(base: TinyBase, setting: Setting) -> None:
    """Against parameters perturbed out of place, in float64: losses, coefficients and the parameters afterwards."""
    model = copy.deepcopy(base.model).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    mezo, adapted = mezo_full(model, *setting.parts)
    batch, seeds, lr, eps = setting.inputs(0)
    losses, coefficients = mezo.step(batch, seeds, lr, eps)
    after = [parameter.detach().clone() for parameter in model.parameters()]
    drawn = [torch_noise((int(k0), int(k1))) for k0, k1 in seeds]
    noise = [[draw(parameter) for parameter in before] for draw in drawn]
    expected = list(before)
    for sign, side in ((1, losses[:3]), (-1, losses[3:])):
        for z, loss in zip(noise, side, strict=True):
            _assign(model, [parameter + sign * eps * each for parameter, each in zip(before, z, strict=True)])
            with torch.no_grad():
                assert float(loss) == pytest.approx(
                    float(adapted.losses(batch, adapted.zeros().unsqueeze(0))), rel=1e-6
                )
    for z, plus, minus in zip(noise, losses[:3].tolist(), losses[3:].tolist(), strict=True):
        coefficient = lr / 3 * (plus - minus) / (2 * eps)
        expected = [parameter - coefficient * each for parameter, each in zip(expected, z, strict=True)]
    for found, wanted in zip(after, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
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
        found = []
        for step in (0.0, 1e-3, -1e-3):
            _assign(model, [old + step * each for old, each in zip(before, z, strict=True)])
            with torch.no_grad():
                found.append(float(first.adapted.losses(batch, first.adapted.zeros().unsqueeze(0))))
        slope = sum(float((gradient * each).sum()) for gradient, each in zip(gradients, z, strict=True))
        assert loss == pytest.approx(found[0], rel=1e-6)
        assert slope == pytest.approx((found[1] - found[2]) / 2e-3, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("contender", list(Contender))
def test_every_contender_makes_steps_in_pytorch(place: Place, contender: Contender) -> None:
    cell = _cell(contender=contender, queries=1)
    found = measure_here(_asked(place, cell, rounds=2))
    assert len(found["seconds"]) == 2
    assert found["peak_rss_bytes"] >= found["loaded_bytes"] // 2 > 1 << 20


def test_a_cell_is_measured_once_in_a_process_of_its_own(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = _cell(engine="executorch")
    row = measure(cell, place, rounds=2, seconds=600)  # a machine that does much else may be slow
    assert len(row["seconds"]) == 2, row
    assert row["peak_rss_bytes"] > 1 << 20
    monkeypatch.setattr(step_grid, "run", None)
    assert measure(cell, place, rounds=2) == row


def test_a_run_whose_time_is_up_reads_what_is_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, other = _cell(length=9), _cell(length=13)
    row = measure(kept, place, rounds=1, seconds=600)
    monkeypatch.setattr(step_command, "cells", lambda extent, device: [other, kept])
    # On a GPU nothing is asked of the machine first.
    found = step_command.grid(place, "plain", step_command.Where.CUDA, cap=1, limit=0)
    assert [each.get("skipped") for each in found.rows] == ["the run's time was up", None]
    assert found.rows[1] == row


def test_a_cell_that_takes_too_much_is_ended_and_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(step_grid, "SPARE_BYTES", 1 << 60)
        assert measure(_cell(length=10), place)["skipped"] == "more memory than the machine has left"
    monkeypatch.setattr(step_grid, "START_SECONDS", 0.0)
    assert measure(_cell(length=11), place, seconds=0.0)["skipped"] == "not done in 0 s"


def test_a_cell_that_fails_is_not_kept(place: Place, tmp_path: Path) -> None:
    absent = Place(tmp_path, str(tmp_path / "absent"), place.base, place.shape)
    assert measure(_cell(), absent)["error"]
    assert not list(tmp_path.glob("cells/*"))


def test_peak_memory_is_of_ours_over_first_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_here(recipe: Recipe, directory: Path, source: Path) -> Compiled:
        directory.mkdir(parents=True)
        manifest = compile_program(recipe, str(source), directory, inference=False)
        (directory / "manifest.json").write_text(manifest.model_dump_json())
        return Compiled(manifest, directory, 0.0)

    monkeypatch.setattr(memory, "compile_cold", compile_here)
    monkeypatch.setattr(memory, "PRECISIONS", ("fp32",))  # the tiny base is too narrow to be quantized
    rows, over = memory.peak_memory_claim(tmp_path / "keep", write_base(tmp_path / "base"), 64, 4, 2)
    first, ours = rows
    assert over == ours["peak_rss_bytes"] / first["peak_rss_bytes"]
    assert (first["contender"], ours["contender"]) == (Contender.FO_LORA_FA, Contender.MOBIZO)
    assert ours["peak_rss_bytes"] > ours["weights_bytes"]
    monkeypatch.setattr(step_grid, "run", None)
    monkeypatch.setattr(memory, "compile_cold", None)
    assert memory.peak_memory_claim(tmp_path / "keep", tmp_path / "base", 64, 4, 2) == (rows, over)


SHAPE = BaseShape(
    architecture="llama",
    layers=2,
    hidden=8,
    intermediate=16,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocabulary=32,
    context_length=512,
)
BASE = BaseRef(name="made", sha256="0" * 64)


def test_the_floor_is_the_longer_of_products_and_reading() -> None:
    cell = _cell(contender=Contender.MEZO_LORA_FA, queries=1, batch=1)
    # A layer: q, o 8 x 8; k, v 8 x 4; gate, up, down 8 x 16. In float32.
    weights = 4 * 2 * (2 * 64 + 2 * 32 + 3 * 128)
    row = cell.model_dump(mode="json")
    reading = floor_seconds(row, BASE, SHAPE, Machine(torch_flops=1e30, xnnpack_flops=1e30, read_bytes=1e3))
    assert reading == pytest.approx(2 * weights / 1e3)  # one pass for each path
    # Two paths of 8 tokens; rank 16 on q and v; attention's two products; one answer token, two candidates.
    a_and_b = 16 * (8 + 8) + 16 * (8 + 4)
    layer = 8 * (2 * 64 + 2 * 32 + 3 * 128 + a_and_b) + 2 * 8 * 8 * 8
    computing = floor_seconds(row, BASE, SHAPE, Machine(torch_flops=1e3, xnnpack_flops=1e30, read_bytes=1e30))
    assert computing == pytest.approx(2 * 2 * (2 * layer + 8 * 2) / 1e3)
    assert floor_seconds(row | {"precision": "int8"}, BASE, SHAPE, Machine(1.0, 1.0, 1.0)) is None


def _measured(seconds: float, gigabytes: float, **settings: Any) -> dict[str, Any]:
    cell = _cell(**settings)
    row = {"who": cell.label, **cell.model_dump(mode="json")}
    return row | {"seconds": [seconds], "peak_rss_bytes": int(gigabytes * 1e9), "floor_seconds": seconds / 2}


def test_the_papers_figure_stands_under_ours() -> None:
    at = {"length": 128, "batch": 8, "queries": 1}
    grid = Grid(
        [
            _measured(6.0, 1.5, contender=Contender.MEZO_LORA_FA, **at),
            _measured(3.0, 2.5, contender=Contender.INNER, **at),
            {
                "who": "x",
                **_cell(length=256).model_dump(mode="json"),
                "skipped": "more memory than the machine has left",
            },
        ],
        "made",
    )
    tables = {table.name: table for table in tables_of(grid)}
    assert set(tables) == {"grid", "memory", "inner"}  # no other has a cell of these
    inner = tables["inner"]
    column = inner.columns.index("S 128, B 8")
    assert [row[column] for row in inner.rows] == [6.0, 3.0, 2.0, 0.19, 0.18, 0.19 / 0.18]
    peak = {row[0]: row[tables["memory"].columns.index("S 128, B 8")] for row in tables["memory"].rows}
    assert (peak["MeZO (LoRA-FA), eager"], peak["MobiZO, q = 1, eager"]) == (1.5, 2.5)
    assert (peak["paper: FO (LoRA-FA)"], peak["paper: MobiZO"]) == (5.98, 2.56)
    assert all(len(row) == len(table.columns) for table in tables.values() for row in table.rows)
    assert tables["grid"].rows[-1][-1] == "more memory than the machine has left"


def test_what_the_inner_loop_gains_is_claimed_by_engine_and_precision() -> None:
    at: dict[str, Any] = {"length": 64, "batch": 1, "queries": 1}
    ways = [{}, {"engine": "executorch"}, {"engine": "executorch", "precision": "int8"}, {"engine": "compile"}]
    rows = [
        _measured(seconds, 1.0, contender=contender, **at, **way)
        for number, way in enumerate(ways, 2)
        for contender, seconds in ((Contender.MEZO_LORA_FA, number), (Contender.INNER, 1.0))
    ]
    claims = step_command.claims_of(Grid(rows[:-1], "made"))  # no inner loop by torch.compile, so no claim of it
    found = {name: value for name, value in claims.items() if name.startswith("inner")}
    assert found == {
        "inner_speedup_eager_s64_b1": 2,
        "inner_speedup_executorch_s64_b1": 3,
        "inner_speedup_executorch_int8_s64_b1": 4,
    }
    assert (claims["grid_cells"], claims["grid_cells_not_measured"]) == (7, 0)
    assert claims["times_floor_eager"] == 2


@pytest.mark.parametrize("extent", ["quick", "plain", "full"])
def test_a_grid_holds_every_contender_and_engine_once(extent: Extent) -> None:
    found = cells(extent)
    assert {cell.contender for cell in found} == set(Contender)
    assert {cell.engine for cell in found} == {"eager", "compile", "executorch"}
    assert len({cell.name for cell in found}) == len(found)
    assert all(cell.batch % cell.queries == 0 for cell in found)
    assert set(found) <= set(cells("full"))


def test_a_grid_on_a_gpu_is_pytorchs() -> None:
    assert {(cell.engine, cell.device) for cell in cells("plain", "cuda")} == {("eager", "cuda"), ("compile", "cuda")}


def test_padding_is_counted_as_in_the_papers_drawing() -> None:
    """fig:padding: eight sequences as one batch of 8, 448 tokens of padding; here every batch of 8 is that one."""
    lengths = np.array([40, 60, 100, 50, 30, 128, 70, 90])
    found = padding_of(lengths, draws=50)
    assert found.batched[8] == pytest.approx(1 - 568 / (8 * 128)) == pytest.approx(found.static)
    assert found.batched[1] == 0
    pairs = [1 - (a + b) / (2 * max(a, b)) for a, b in itertools.combinations(lengths.tolist(), 2)]
    assert padding_of(lengths, draws=20_000).batched[2] == pytest.approx(np.mean(pairs), abs=0.005)
    assert found.fewer[1] == pytest.approx(128 / 71, rel=0.2)


def test_lengths_are_of_what_the_network_reads(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_base(tmp_path / "base") / "tokenizer.json"))
    path = tmp_path / "train.jsonl"
    texts = ["dull", "a warm and funny film"]
    path.write_text("".join(json.dumps({"text": text, "label": "positive"}) + "\n" for text in texts))
    # " great" is one token of this tokenizer or several; all but the last one are read.
    read = [len(tokenizer.encode(f"{text} It was great").ids) - 1 for text in texts]
    assert sequence_lengths(path, "sst2", tokenizer).tolist() == read
