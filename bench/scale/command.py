"""`bench scale`: compile and train bases from 135 million to 7 billion weights, random values, on one machine.

Columns: `compile_peak_bytes` is of the compiler's whole process tree. On the device (native runner) `load_seconds`
pass until the weights are loaded, and `second_load_seconds` in the next run of the same program; a step has 64 tokens a
sequence. `replay` adapts all layers with q = 2, E = 2; `gradient` and `directional` (q = 256) the last 8 with E = 4;
`text` is a step of exact gradients in all layers on one text of 128 tokens.
`floor_seconds` is a float32 step's matrix products alone, in XNNPACK. A program that may not fit into free memory is
compiled and not trained; its device columns are missing.
`families` is a tiny model of every family instead: see `bench.scale.families`.
"""

import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from bench.programs import compile_cold
from bench.result import Claims, Row, commit, notes, write
from bench.runner import JsonFile, Keep, Only, Quick, load_or_compute, select_parts
from bench.scale.bases import QUICK, SIZES, Size, write_random_base
from bench.scale.families import LLAMA, TYPES, families
from bench.scale.measurement import device_run, recipe_of, watch_children
from device_agent.executors.runner import RunnerLauncher
from device_agent.runner.location import find_runner

FAMILIES = "families"  # a part besides the sizes
CLAIMED = ("TinyLlama-1.1B", "tiny")


def scale(json_file: JsonFile = None, quick: Quick = False, only: Only = None, keep: Keep = None) -> None:
    """Compile and train bases from 135M to 7B, of random weights: time, memory and sizes; and one of every family."""
    sizes = {"tiny": QUICK} if quick else SIZES
    parts = select_parts([*sizes, FAMILIES], only)
    with tempfile.TemporaryDirectory() as name:
        kept = keep or Path(name)
        rows = [row for part in parts if part in sizes for row in _rows_of(part, sizes[part], kept)]
        claims = claims_of(rows)
        if FAMILIES in parts:
            family_rows, family_claims = families([LLAMA] if quick else TYPES, kept / FAMILIES)
            rows, claims = rows + family_rows, claims | family_claims
    write(json_file, rows, claims)


def _rows_of(size_name: str, size: Size, keep: Path) -> Iterator[Row]:
    """Yields the rows of one size. Its base and programs exist only meanwhile; `keep` has the finished rows."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"

        @cache
        def write_base() -> int:
            notes.print(f"{size_name}: random weights")
            return write_random_base(size, base)

        def measure(precision: str, estimator: str) -> Row:
            parameters = write_base()
            notes.print(f"{size_name}: {estimator} in {precision}")
            row = {"base": size_name, "parameters": parameters, "precision": precision, "estimator": estimator}
            row |= {"commit": commit()}
            with tempfile.TemporaryDirectory(dir=name) as directory:
                with watch_children() as memory:
                    program = compile_cold(recipe_of(base, precision, estimator, size), Path(directory), base)
                row |= {"compile_seconds": program.seconds, "compile_peak_bytes": memory[0]}
                row |= {"ptd_bytes": program.size("weights")}
                return row | device_run(RunnerLauncher(find_runner()), program, parameters)

        for run in size.runs:
            yield dict(load_or_compute(keep / ".".join((size_name, *run, "json")), partial(measure, *run)))


def claims_of(rows: list[Row]) -> Claims:
    """Returns the claims, which are of TinyLlama's shape; those of a quick run are of the tiny base."""
    claims: Claims = {}
    for row in rows:
        if row["base"] not in CLAIMED or row["estimator"] != "replay":
            continue
        if row["precision"] == "int8":
            claims["compile_peak_over_result_1b"] = row["compile_peak_bytes"] / row["ptd_bytes"]
        if "step_seconds" in row:
            share = row["peak_rss_bytes"] / row["ptd_bytes"]
            claims[f"device_peak_rss_over_weights_{row['precision']}"] = share
        if row.get("floor_seconds"):
            claims["step_seconds_1b_over_floor"] = row["step_seconds"] / row["floor_seconds"]
    return claims
