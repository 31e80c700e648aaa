"""Peak memory of MobiZO's program against first-order LoRA-FA in PyTorch, each a process of its own.

Ours is the product's: the program as the server compiles it, opened by the agent's runtime, training and evaluating by
turns; its peak is the process's whole life. First order is a step of `bench.baselines.first_order` alone, its peak
counted from when the model has been loaded. Same model, targets, layers, number of sequences and length.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.cells import Cell, Contender
from bench.programs import compile_cold
from bench.result import commit
from bench.step import notes, peak_rss
from bench.step_grid import Place, measure, open_place
from shared.recipe import Precision

Row = dict[str, Any]
LENGTH, BATCH, QUERIES = 256, 16, 4
FIRST_ORDER_SECONDS = 600.0  # at most half of what it may take
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")


def peak_memory_claim(
    keep: Path | None = None, base: Path | None = None, length: int = LENGTH, batch: int = BATCH, queries: int = QUERIES
) -> tuple[list[Row], float]:
    """Rows of first order, ours in fp32 and ours in int8, and ours in fp32 over first order.

    keep: a directory where what was measured stays; base: a model's directory, SmolLM2-135M if None; E = batch / q.
    """
    with open_place(keep, base) as place:
        cell = Cell(contender=Contender.FO_LORA_FA, engine="eager", length=length, batch=batch)
        notes.print(f"peak memory: {cell.label}")
        first = measure(cell, place, rounds=1, seconds=FIRST_ORDER_SECONDS)
        if "peak_rss_bytes" not in first:
            raise SystemExit(f"{cell.label} was not measured: {first}")
        rows = [first, *(_ours(place, length, batch, queries, precision) for precision in PRECISIONS)]
    for row in rows:
        row["over_first_order"] = row["peak_rss_bytes"] / first["peak_rss_bytes"]
    return rows, float(rows[1]["over_first_order"])


def _ours(place: Place, length: int, batch: int, queries: int, precision: Precision) -> Row:
    cell = Cell(
        contender=Contender.MOBIZO,
        engine="executorch",
        precision=precision,
        length=length,
        batch=batch,
        queries=queries,
    )
    directory = place.directory / "product" / f"{place.base.sha256[:12]}.{cell.name}"
    kept = directory / "row.json"
    if not kept.exists():
        notes.print(f"peak memory: {cell.label}, {precision}")
        program = compile_cold(cell.recipe(place.base), directory, Path(place.source))
        row = {
            "commit": commit(),
            "who": f"{cell.label}, training and evaluating",
            **cell.model_dump(mode="json"),
            "peak_rss_bytes": peak_rss(directory),
            "weights_bytes": program.size("weights"),
            "planned_bytes": program.manifest.planned_bytes,
        }
        kept.write_text(json.dumps(row))
    return dict(json.loads(kept.read_text()))
