"""`bench step`: a grid of steps in seconds and memory, peak memory against first order, and ratios timed by turns."""

import math
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bench.runner import Full, JsonFile, Keep, Only, Quick, run_parts
from bench.step import ratios
from bench.step.cells import Device, Extent
from bench.step.grid import grid
from bench.step.memory import peak_memory

QUICK_LIMIT = 200.0
ROUNDS = 7  # timed turns of each ratio


def step(
    json_file: JsonFile = None,
    quick: Quick = False,
    full: Full = False,
    keep: Keep = None,
    only: Only = None,
    device: Annotated[Device, typer.Option(help="cuda: only the grid of PyTorch's contenders.")] = "cpu",
    base: Annotated[Path | None, typer.Option(help="The grid's model directory; default: SmolLM2-135M.")] = None,
    limit: Annotated[
        float | None, typer.Option(min=0, help=f"Seconds after which no cell begins; --quick: {QUICK_LIMIT:g}.")
    ] = None,
) -> None:
    """Time steps by contender, engine, precision, length and batch; peak memory; ratios."""
    if quick and full:
        raise typer.BadParameter("choose --quick or --full")
    extent: Extent = "quick" if quick else "full" if full else "plain"
    if limit is None:
        limit = QUICK_LIMIT if quick else math.inf
    if not only and (quick or base or device == "cuda"):
        only = ["grid"]
    with tempfile.TemporaryDirectory() as name:
        place = keep or Path(name)
        parts = {
            "grid": lambda quick: grid(place, base, extent, device, limit),
            "memory": lambda quick: peak_memory(place, base),
            "ratios": lambda quick: ratios.measure(ROUNDS),
        }
        run_parts(parts, json_file, quick, only)
