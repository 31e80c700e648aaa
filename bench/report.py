"""The form of every benchmark's result: machine, commit, rows and named claims."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit measured, with `+` if the tree differs from it."""
    found = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def write(path: Path | None, rows: list[dict[str, Any]], claims: dict[str, float]) -> None:
    """Prints rows and claims, and writes them to `path` as JSON."""
    result = {"machine": machine(), "commit": commit(), "rows": rows, "claims": claims}
    print(json.dumps(result, indent=2))
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")
