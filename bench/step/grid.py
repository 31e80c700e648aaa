"""Measures the grid's cells one after another, each in a process of its own, and keeps the figures in a directory.

A cell that needs more memory than the machine has left, or more time than its limit, is ended, and its row says so.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.programs import model_file
from bench.result import Claims, Measured, Row, commit, notes
from bench.runner import kept
from bench.step.process import Cell, Contender, Device, Extent, Order, cells
from server.compiler.checkpoints.base import locate_base
from server.compiler.checkpoints.checkpoint import inspect_base
from shared.recipe import BaseRef
from shared.zo.lora import BaseShape

ROUNDS: dict[Extent, int] = {"quick": 2, "plain": 3, "full": 5}  # timed ones of a cell
POLL_SECONDS = 0.1
SPARE_BYTES = 1 << 30  # that a cell must leave to the rest of the machine
START_SECONDS = 240.0  # besides the rounds: imports, loading, torch.compile
COMPILE_SECONDS = 900.0


@dataclass(frozen=True)
class Place:
    """The directory of programs and figures, and the base model they belong to."""

    directory: Path
    source: str
    base: BaseRef
    shape: BaseShape

    def file(self, kind: str, name: str) -> Path:
        """Returns the path of a kept file of this base."""
        path = self.directory / kind / f"{self.base.sha256[:12]}.{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@contextmanager
def open_place(keep: Path | None = None, source: Path | None = None) -> Iterator[Place]:
    """Opens a place in `keep`, or in a temporary directory. source: SmolLM2-135M if None."""
    with tempfile.TemporaryDirectory() as name:
        found = str(source or model_file())
        facts = inspect_base(found)
        shape = BaseShape(**{field: getattr(facts, field) for field in BaseShape.model_fields})
        base = BaseRef(name=Path(found).stem, sha256=locate_base(found).sha256)
        directory = keep or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        yield Place(directory, found, base, shape)


def grid(keep: Path, base: Path | None, extent: Extent, device: Device, limit: float) -> Measured:
    """Returns the rows of all cells, and their claims. keep, base: as in `open_place`; limit: as in `measure_grid`."""
    with open_place(keep, base) as place:
        rows = measure_grid(place, extent, device, limit)
    return rows, grid_claims(rows)


def measure_grid(place: Place, extent: Extent, device: Device, limit: float) -> list[Row]:
    """Returns the rows of all cells. After `limit` seconds no further cell is measured; kept ones are still read."""
    wanted = cells(extent, device)
    rows = []
    began = time.monotonic()
    for number, cell in enumerate(wanted, 1):
        notes.print(f"{number} of {len(wanted)}: {cell.name}")
        if time.monotonic() - began <= limit or place.file("cells", f"{cell.name}.json").exists():
            row = measure(cell, place, ROUNDS[extent])
        else:
            row = {"who": cell.label, **cell.model_dump(mode="json"), "skipped": "the time limit was reached"}
        if not row.get("seconds"):
            notes.print(f"not measured: {row.get('skipped', row.get('error'))}")
        rows.append(row)
    return rows


def measure(cell: Cell, place: Place, rounds: int = 3, seconds: float = 60.0) -> Row:
    """Returns the cell's row: its figures, or the reason why there are none (`skipped`, or `error`, which is not kept).

    seconds: after this time no further round begins; after twice the time the cell is ended.
    """
    about = {"commit": commit(), "who": cell.label, **cell.model_dump(mode="json")}
    path = place.file("cells", f"{cell.name}.json")
    return dict(kept(path, lambda: about | _measured(cell, place, rounds, seconds)))


def _measured(cell: Cell, place: Place, rounds: int, seconds: float) -> Row:
    order = Order(
        what="measure",
        cell=cell,
        **{name: getattr(place, name) for name in ("source", "base", "shape")},
        program=str(place.file("programs", f"{cell.name}.pte")),
        weights=str(place.file("programs", f"{cell.precision}.ptd")),
        rounds=rounds,
        seconds=seconds,
    )
    found: Row = {}
    if cell.engine == "executorch" and not Path(order.program).exists():
        found = run(order.model_copy(update={"what": "compile"}), COMPILE_SECONDS)
    return found if {"skipped", "error"} & set(found) else found | run(order, START_SECONDS + 2 * seconds)


def run(order: Order, seconds: float) -> Row:
    """Runs an order in a process; returns its output, `skipped` if it was ended, or `error` if it failed."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.step.process", order.model_dump_json()]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = psutil.Popen(command, stdout=out, stderr=err)
        began, why = time.monotonic(), ""
        while process.poll() is None and not why:
            time.sleep(POLL_SECONDS)
            if psutil.virtual_memory().available < SPARE_BYTES:
                why = "it needs more memory than the machine has left"
            elif time.monotonic() - began > seconds:
                why = f"it did not end within {seconds:.0f} s"
        if why:
            process.kill()
            process.wait()
            return {"skipped": why}
        out.seek(0)
        err.seek(0)
        output, failure = out.read().strip().splitlines(), err.read().strip().splitlines()
    if process.returncode:
        return {"error": failure[-1][:300] if failure else f"exit status {process.returncode}"}
    return dict(json.loads(output[-1]))


def grid_claims(rows: Iterable[Row]) -> Claims:
    """Names the speedup of the inner loop, and the size of the grid."""
    rows = list(rows)
    measured = [row for row in rows if row.get("seconds")]
    claims = {"grid_cells": float(len(rows)), "grid_cells_not_measured": float(len(rows) - len(measured))}
    for engine in ("eager", "compile", "executorch"):
        for precision in ("fp32", "int8", "int4"):
            at = {"engine": engine, "precision": precision, "length": 64, "batch": 1, "queries": 1}
            seconds = {
                row["contender"]: statistics.median(row["seconds"])
                for row in measured
                if all(row[key] == value for key, value in at.items())
            }
            if Contender.MEZO_LORA_FA in seconds and Contender.INNER in seconds:
                name = engine if precision == "fp32" else f"{engine}_{precision}"
                ratio = seconds[Contender.MEZO_LORA_FA] / seconds[Contender.INNER]
                claims[f"inner_speedup_{name}_s64_b1"] = ratio
    return claims
