"""`bench step`: what a step costs: a grid of contenders in seconds and memory, peak memory, and ratios timed by turns.

The grid's cells: bench.step_cells; each is measured in a process of its own (bench.step_grid) and laid out as the paper
lays out its tables (bench.step_tables). Peak memory against first order: bench.memory. Ratios: bench.step_ratios.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import step_ratios
from bench.cells import Cell, Contender
from bench.floor import gemm_seconds, read_bandwidth, torch_gemm_seconds
from bench.memory import peak_memory_claim
from bench.result import Plot, Table, write
from bench.step import notes, show
from bench.step_cells import Extent, cells
from bench.step_grid import Place, is_kept, measure, open_place
from bench.step_tables import Grid, Machine, floor_seconds, plots_of, tables_of, times_floor
from server.compiler.cost import step_flops

Row = dict[str, Any]
QUICK_LIMIT = 200.0  # after which a quick run begins no further cell
ROUNDS: dict[Extent, int] = {"quick": 2, "plain": 3, "full": 5}  # timed ones of a cell
GEMM_ROUNDS = 10
CAP_SECONDS = 60.0


class Part(StrEnum):
    """What may be measured alone."""

    GRID = "grid"
    MEMORY = "memory"
    RATIOS = "ratios"


class Where(StrEnum):
    """Where PyTorch's contenders run."""

    CPU = "cpu"
    CUDA = "cuda"


def step(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result here")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the ratios into this directory")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a few cells of the grid, no ratios")] = False,
    full: Annotated[bool, typer.Option("--full", help="every cell of the grid: hours")] = False,
    device: Annotated[Where, typer.Option(help="cuda: PyTorch's contenders on a GPU, the grid alone")] = Where.CPU,
    base: Annotated[Path | None, typer.Option(help="the grid's model, a directory; default: SmolLM2-135M")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="keep programs and what was measured here; go on with what is there")
    ] = None,
    cap: Annotated[float, typer.Option(min=1, help="seconds after which a cell begins no further round")] = CAP_SECONDS,
    limit: Annotated[
        float | None,
        typer.Option(min=0, help=f"seconds after which no further cell is begun; default: none, quick {QUICK_LIMIT:g}"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="timed turns of each ratio")] = 7,
    only: Annotated[list[Part] | None, typer.Option("--only", help="these parts; default: all that apply")] = None,
) -> None:
    """Time steps: contenders, engines and precisions over lengths and batches; peak memory; ratios."""
    if quick and full:
        raise typer.BadParameter("say --quick or --full")
    extent: Extent = "quick" if quick else "full" if full else "plain"
    if limit is None:
        limit = QUICK_LIMIT if quick else math.inf
    parts = only or ([Part.GRID] if quick or device == Where.CUDA or base else list(Part))
    rows: list[Row] = []
    claims: dict[str, float] = {}
    tables: list[Table] = []
    plots: list[Plot] = []
    with tempfile.TemporaryDirectory() as name:
        place = keep or Path(name)
        if Part.GRID in parts:
            with open_place(place, base) as where:
                found = grid(where, extent, device, cap, limit)
            rows += found.rows
            claims |= claims_of(found)
            tables += tables_of(found)
            plots += plots_of(found)
        if Part.MEMORY in parts:
            of, over = peak_memory_claim(place, base)
            rows += [{"comparison": "peak memory", **row} for row in of]
            claims |= {"peak_memory_vs_first_order": over, "peak_memory_vs_first_order_int8": of[2]["over_first_order"]}
            tables.append(peak_table(of))
        if Part.RATIOS in parts:
            of, said = step_ratios.measure(rounds)
            rows += of
            claims |= said
            if plot is not None:
                step_ratios.draw(said, plot)
    show(claims)
    write(json_file, rows, claims, tables, plots)


def grid(place: Place, extent: Extent, device: Where, cap: float, limit: float) -> Grid:
    """Measures what is not measured yet, until `limit` seconds have passed."""
    chosen = cells(extent, device.value)
    machine = None if device == Where.CUDA else machine_of(place)
    rows = []
    began = time.monotonic()
    for number, cell in enumerate(chosen, 1):
        notes.print(f"{number} of {len(chosen)}: {cell.label}, {cell.engine}, {cell.precision}, ", end="")
        notes.print(f"S = {cell.length}, B = {cell.batch}")
        if time.monotonic() - began <= limit or is_kept(cell, place):
            row: Row = measure(cell, place, ROUNDS[extent], cap)
        else:
            row = {"who": cell.label, **cell.model_dump(mode="json"), "skipped": "the run's time was up"}
        if machine is not None:
            row["floor_seconds"] = floor_seconds(row, place.base, place.shape, machine)
        if not row.get("seconds"):
            notes.print(f"not measured: {row.get('skipped', row.get('error'))}")
        rows.append(row)
    return Grid(rows, place.base.name, device.value)


def machine_of(place: Place) -> Machine:
    """Rates of one layer's matrix products in either library, q = 4 and E = 4 at S = 64, and of reading."""
    kept = place.directory / f"{place.base.sha256[:12]}.machine.json"
    if not kept.exists():
        notes.print("matrix products and memory alone")
        cell = Cell(contender=Contender.MOBIZO, engine="executorch", length=64, batch=16, queries=4)
        recipe = cell.recipe(place.base)
        flops = step_flops(recipe, place.shape) / place.shape.layers
        found = Machine(
            torch_flops=flops / min(torch_gemm_seconds(recipe, place.shape, GEMM_ROUNDS)),
            xnnpack_flops=flops / min(gemm_seconds(recipe, place.shape, GEMM_ROUNDS)),
            read_bytes=read_bandwidth(),
        )
        kept.write_text(json.dumps(vars(found)))
    return Machine(**json.loads(kept.read_text()))


def claims_of(found: Grid) -> dict[str, float]:
    """How far the engines are from their floors, what the inner loop gains, and how much of the grid there is."""
    claims = {
        "grid_cells": float(len(found.rows)),
        "grid_cells_not_measured": float(sum(not row.get("seconds") for row in found.rows)),
    }
    for engine in ("eager", "compile", "executorch"):
        times = [
            times
            for row in found.rows
            if row["engine"] == engine and row.get("seconds") and (times := times_floor(row)) is not None
        ]
        if times:
            claims[f"times_floor_{engine}"] = statistics.median(times)
        for precision in ("fp32", "int8", "int4"):
            slow = found.seconds(Contender.MEZO_LORA_FA, 64, 1, engine=engine, precision=precision)
            fast = found.seconds(Contender.INNER, 64, 1, engine=engine, precision=precision)
            if slow is not None and fast is not None:
                name = engine if precision == "fp32" else f"{engine}_{precision}"
                claims[f"inner_speedup_{name}_s64_b1"] = slow / fast
    return claims


def peak_table(rows: list[Row]) -> Table:
    """The peak memory claim."""
    return Table(
        name="peak",
        title=f"Peak memory at S = {rows[0]['length']}, batch {rows[0]['batch']}, against first-order LoRA-FA",
        columns=("who", "engine", "precision", "peak GB", "over first order"),
        rows=tuple(
            (row["who"], row["engine"], row["precision"], row["peak_rss_bytes"] / 1e9, row["over_first_order"])
            for row in rows
        ),
        notes="Resident memory, Python and libraries included. Ours: the process's whole life, by the server's program "
        "and the agent's runtime. First order: during a step, the model loaded before.",
    )
