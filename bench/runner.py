"""Shared by all benchmark commands: options, selection of parts, kept results, and timing by turns."""

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from bench.result import Claims, Measurement, Row, notes, write

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small run: shows that it works, not a figure to quote.")]
Keep = Annotated[Path | None, typer.Option(help="Keep finished parts here and skip them in the next run.")]
Parts = Mapping[str, Callable[[bool], Measurement]]
SEEDS = (0, 1, 2)
Only = Annotated[list[str] | None, typer.Option("--only", help="Measure only this part; may be repeated.")]


def select_parts(parts: Collection[str], only: list[str] | None) -> list[str]:
    """Returns the names of the parts to measure, in their order. Raises typer.BadParameter for an unknown name."""
    if unknown := set(only or ()) - set(parts):
        raise typer.BadParameter(f"unknown part {', '.join(sorted(unknown))}; the parts are {', '.join(parts)}")
    return [name for name in parts if not only or name in only]


def run_parts(parts: Parts, json_file: Path | None, quick: bool, only: list[str] | None) -> None:
    """Measures the selected parts in order and writes one result; each row names its part."""
    rows: list[Row] = []
    claims: Claims = {}
    for name in select_parts(parts, only):
        notes.print(name)
        part_rows, part_claims = parts[name](quick)
        rows += [{"part": name, **row} for row in part_rows]
        claims |= part_claims
    write(json_file, rows, claims)


def command_of(parts: Parts, help_text: str) -> Callable[..., None]:
    """Returns the command of a benchmark that consists of parts."""

    def command(json_file: JsonFile = None, quick: Quick = False, only: Only = None) -> None:
        run_parts(parts, json_file, quick, only)

    command.__doc__ = help_text
    return command


def load_or_compute(path: Path, compute: Callable[[], Any]) -> Any:
    """Returns the JSON value in `path`. Computes and stores it if there is none."""
    if path.exists():
        return json.loads(path.read_bytes())
    value = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)
    return value


def rows_of_seeds(
    path: Path, quick: bool, compute: Callable[[int, bool], Row], seeds: Sequence[int] = SEEDS
) -> list[Row]:
    """Returns a row for each seed, only for the first one if quick; they are kept in `path`-SEED.json, and shown."""
    rows: list[Row] = []
    for seed in seeds[: 1 if quick else None]:
        rows.append(load_or_compute(Path(f"{path}-{seed}.json"), partial(compute, seed, quick)))
        notes.print(f"{rows[-1]}")
    return rows


def time_by_turns(rounds: int, calls: Mapping[str, Callable[[int], Any]]) -> dict[str, list[float]]:
    """Returns the seconds of each call, `rounds` times in turn after one warm-up, so that all see the same load."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call(number)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    """Returns how many times faster the second call is: the median over turns."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def cpu_seconds(process: psutil.Process) -> float:
    """Returns the processor time of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def peak_memory(pid: int) -> int:
    """Returns the highest resident set of a process so far, bytes; 0 if it has just ended."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 if match else 0


def run_module(module: str, argument: object) -> Any:
    """Runs `python -m module JSON` and returns its JSON output: a measurement in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", module, json.dumps(argument)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{module} failed: {process.stderr[-2000:]}")
    return json.loads(process.stdout.strip().splitlines()[-1])
