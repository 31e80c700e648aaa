"""The result of a benchmark: the machine, the commit, the rows measured and the named claims. One JSON file each."""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from shared.strict_model import StrictModel

Row = dict[str, Any]
Claims = dict[str, float]
Measurement = tuple[list[Row], Claims]

notes = Console(stderr=True, highlight=False)  # progress messages


class Result(StrictModel):
    """The measurements of one run of a benchmark. Documents quote the claims by name (see bench.figures)."""

    machine: dict[str, Any]
    commit: str
    rows: list[Row]
    claims: Claims

    def text(self) -> str:
        """Returns the content of a result file."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"


def machine() -> dict[str, Any]:
    """Describes the machine that runs this process. `instructions` are those that decide how fast int8 is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    described = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = described.get("flags", described.get("Features", "")).split()
    return {
        "cpu": described.get("model name", platform.machine()),
        "instructions": sorted({"avx2", "avx_vnni", "avx512f", "avx512_vnni", "asimddp", "i8mm"}.intersection(flags)),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Returns the current commit, with a `+` if the working tree differs from it."""
    process = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return process.stdout.strip() or "unknown"


def write(path: Path | None, rows: list[Row], claims: Claims) -> None:
    """Prints rows and claims, one a line, and writes the result to `path` as JSON if a path is given."""
    for row in rows:
        print(json.dumps(row))
    for name, value in claims.items():
        print(f"{name}: {value:.4g}")
    if path is not None:
        result = Result(machine=machine(), commit=commit(), rows=rows, claims=claims)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(result.text())


def results_in(directory: Path) -> dict[str, Result]:
    """Reads every result file of a directory, by benchmark name."""
    return {path.stem: Result.model_validate_json(path.read_bytes()) for path in sorted(directory.glob("*.json"))}
