"""The grid's cells, measured one after another, each in a process of its own; what was measured stays in a directory.

A cell that takes more memory than the machine has left or more time than it is given is ended, and its row says so.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.cells import Cell
from bench.programs import model_file
from bench.result import commit
from bench.step_cell import Asked
from server.compiler.base import locate_base
from shared.lora import BaseShape
from shared.recipe import BaseRef

Row = dict[str, Any]
POLL_SECONDS = 0.1
SPARE_BYTES = 1 << 30  # that a cell must leave to the rest of the machine
START_SECONDS = 240.0  # besides its rounds: imports, loading, torch.compile
COMPILE_SECONDS = 900.0


@dataclass(frozen=True)
class Place:
    """Where programs and figures are kept, and the base they are of."""

    directory: Path
    source: str
    base: BaseRef
    shape: BaseShape

    @property
    def model(self) -> Path:
        """The base in transformers' form: itself, if it is."""
        return Path(self.source) if Path(self.source).is_dir() else self.directory / "model"


@contextmanager
def open_place(keep: Path | None = None, source: Path | None = None) -> Iterator[Place]:
    """A place in `keep`, or one that is gone afterwards. source: SmolLM2-135M if None."""
    from server.compiler.checkpoint import inspect_base

    with tempfile.TemporaryDirectory() as name:
        found = str(source or model_file())
        facts = inspect_base(found)
        directory = keep or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        shape = BaseShape(**{field: getattr(facts, field) for field in BaseShape.model_fields})
        base = BaseRef(name=Path(found).stem, sha256=locate_base(found).sha256)
        yield Place(directory, found, base, shape)


def is_kept(cell: Cell, place: Place) -> bool:
    """Whether the cell was measured before."""
    return _kept(cell, place).exists()


def _kept(cell: Cell, place: Place) -> Path:
    return place.directory / "cells" / f"{place.base.sha256[:12]}.{cell.name}.json"


def measure(cell: Cell, place: Place, rounds: int = 3, seconds: float = 60.0) -> Row:
    """The cell's row: what it is, and its figures or why there are none (`skipped`, or `error`, which is not kept).

    seconds: after which no further round is begun; twice as many end the cell.
    """
    kept = _kept(cell, place)
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    found = _measured(cell, place, rounds, seconds)
    row = {"commit": commit(), "who": cell.label, **cell.model_dump(mode="json"), **found}
    if "error" not in row:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(row))
    return row


def _measured(cell: Cell, place: Place, rounds: int, seconds: float) -> Row:
    programs = place.directory / "programs"
    programs.mkdir(exist_ok=True)
    name = f"{place.base.sha256[:12]}.{cell.name}"
    weights = programs / f"{place.base.sha256[:12]}.{cell.precision}.ptd"
    asked = Asked(
        what="measure",
        cell=cell,
        source=place.source,
        base=place.base,
        shape=place.shape,
        model=str(place.model),
        program=str(programs / f"{name}.pte"),
        weights=str(weights),
        rounds=rounds,
        seconds=seconds,
    )
    found: Row = {}
    if cell.engine == "executorch":
        if not Path(asked.program).exists():
            found = run(asked.model_copy(update={"what": "compile"}), COMPILE_SECONDS)
    elif not place.model.exists():
        found = run(asked.model_copy(update={"what": "base"}), COMPILE_SECONDS)
    return found if {"skipped", "error"} & set(found) else found | run(asked, START_SECONDS + 2 * seconds)


def run(asked: Asked, seconds: float) -> Row:
    """What a process of its own says; `skipped` and why it was ended, or `error` and why it ended itself."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.step_cell", asked.model_dump_json()]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = psutil.Popen(command, stdout=out, stderr=err)
        began = time.monotonic()
        why = ""
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            if psutil.virtual_memory().available < SPARE_BYTES:
                why = "more memory than the machine has left"
            elif time.monotonic() - began > seconds:
                why = f"not done in {seconds:.0f} s"
            if why:
                process.kill()
                process.wait()
                return {"skipped": why}
        out.seek(0)
        err.seek(0)
        said, failed = out.read().strip().splitlines(), err.read().strip().splitlines()
    if process.returncode:
        return {"error": failed[-1][:300] if failed else f"ended with {process.returncode}"}
    return dict(json.loads(said[-1]))
