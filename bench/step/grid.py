"""Measures the grid's cells one after another, each in a process of its own, and keeps the figures in a directory.

A cell that needs more memory than the machine has left, or more time than its limit, is stopped, and its row says why.
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
from bench.result import Claims, Measurement, Row, commit, notes
from bench.runner import load_or_compute
from bench.step.process import Cell, Contender, Device, Extent, ProcessTask, cells
from server.compiler.checkpoints.base import locate_base
from server.compiler.checkpoints.checkpoint import inspect_base
from shared.recipe import BaseRef
from shared.zo.lora import BaseShape

ROUNDS: dict[Extent, int] = {"quick": 2, "plain": 3, "full": 5}  # timed ones of a cell
POLL_SECONDS = 0.1
SPARE_BYTES = 1 << 30  # memory that a cell must leave to the rest of the machine
START_SECONDS = 240.0  # limit of the time before the rounds: imports, loading, torch.compile
COMPILE_SECONDS = 900.0


@dataclass(frozen=True)
class Workspace:
    """A directory of programs and figures, and their base model."""

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
def open_workspace(keep: Path | None = None, source: Path | None = None) -> Iterator[Workspace]:
    """Opens a workspace in `keep`, or in a temporary directory. source: SmolLM2-135M if None."""
    with tempfile.TemporaryDirectory() as name:
        base_source = str(source or model_file())
        facts = inspect_base(base_source)
        shape = BaseShape(**{field: getattr(facts, field) for field in BaseShape.model_fields})
        base = BaseRef(name=Path(base_source).stem, sha256=locate_base(base_source).sha256)
        directory = keep or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        yield Workspace(directory, base_source, base, shape)


def grid(keep: Path, base: Path | None, extent: Extent, device: Device, limit: float) -> Measurement:
    """Returns the rows of all cells, and claims. keep, base: as in `open_workspace`; limit: as in `measure_grid`."""
    with open_workspace(keep, base) as workspace:
        rows = measure_grid(workspace, extent, device, limit)
    return rows, grid_claims(rows)


def measure_grid(workspace: Workspace, extent: Extent, device: Device, limit: float) -> list[Row]:
    """Returns the rows of all cells. After `limit` seconds no further cell is measured; kept ones are still read."""
    grid_cells = cells(extent, device)
    rows = []
    start = time.monotonic()
    for number, cell in enumerate(grid_cells, 1):
        notes.print(f"{number} of {len(grid_cells)}: {cell.name}")
        if time.monotonic() - start <= limit or workspace.file("cells", f"{cell.name}.json").exists():
            row = measure(cell, workspace, ROUNDS[extent])
        else:
            row = {"who": cell.label, **cell.model_dump(mode="json"), "skipped": "the time limit was reached"}
        if not row.get("seconds"):
            notes.print(f"not measured: {row.get('skipped', row.get('error'))}")
        rows.append(row)
    return rows


def measure(cell: Cell, workspace: Workspace, rounds: int = 3, seconds: float = 60.0) -> Row:
    """Returns the cell's row: its figures, or the reason why there are none (`skipped`, or `error`, which is not kept).

    seconds: after this time no further round begins; after twice the time the cell is ended.
    """
    columns = {"commit": commit(), "who": cell.label, **cell.model_dump(mode="json")}
    path = workspace.file("cells", f"{cell.name}.json")
    return dict(load_or_compute(path, lambda: columns | _measure_in_process(cell, workspace, rounds, seconds)))


def _measure_in_process(cell: Cell, workspace: Workspace, rounds: int, seconds: float) -> Row:
    task = ProcessTask(
        action="measure",
        cell=cell,
        **{name: getattr(workspace, name) for name in ("source", "base", "shape")},
        program=str(workspace.file("programs", f"{cell.name}.pte")),
        weights=str(workspace.file("programs", f"{cell.precision}.ptd")),
        rounds=rounds,
        seconds=seconds,
    )
    compilation: Row = {}
    if cell.engine == "executorch" and not Path(task.program).exists():
        compilation = run(task.model_copy(update={"action": "compile"}), COMPILE_SECONDS)
    return (
        compilation if {"skipped", "error"} & set(compilation) else compilation | run(task, START_SECONDS + 2 * seconds)
    )


def run(task: ProcessTask, seconds: float) -> Row:
    """Runs a task in a process; returns its output, `skipped` if it was stopped early, or `error` if it failed."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.step.process", task.model_dump_json()]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = psutil.Popen(command, stdout=out, stderr=err)
        start, reason = time.monotonic(), ""
        while process.poll() is None and not reason:
            time.sleep(POLL_SECONDS)
            if psutil.virtual_memory().available < SPARE_BYTES:
                reason = "it needs more memory than the machine has left"
            elif time.monotonic() - start > seconds:
                reason = f"it did not end within {seconds:.0f} s"
        if reason:
            process.kill()
            process.wait()
            return {"skipped": reason}
        out.seek(0)
        err.seek(0)
        output, failure = out.read().strip().splitlines(), err.read().strip().splitlines()
    if process.returncode:
        return {"error": failure[-1][:300] if failure else f"exit status {process.returncode}"}
    return dict(json.loads(output[-1]))


def grid_claims(rows: Iterable[Row]) -> Claims:
    """Returns the claims: the speedup of the inner loop, and the size of the grid."""
    rows = list(rows)
    measured_rows = [row for row in rows if row.get("seconds")]
    claims = {"grid_cells": float(len(rows)), "grid_cells_not_measured": float(len(rows) - len(measured_rows))}
    for engine in ("eager", "compile", "executorch"):
        for precision in ("fp32", "int8", "int4"):
            point = {"engine": engine, "precision": precision, "length": 64, "batch": 1, "queries": 1}
            seconds = {
                row["contender"]: statistics.median(row["seconds"])
                for row in measured_rows
                if all(row[key] == value for key, value in point.items())
            }
            if Contender.MEZO_LORA_FA in seconds and Contender.INNER in seconds:
                name = engine if precision == "fp32" else f"{engine}_{precision}"
                ratio = seconds[Contender.MEZO_LORA_FA] / seconds[Contender.INNER]
                claims[f"inner_speedup_{name}_s64_b1"] = ratio
    return claims
