"""How long `mobizo simulate` takes: 200 virtual devices, 5 rounds, the built-in base, with everything it is for.

The whole command in a process of its own, Python's start, workers, plots and report included, the program compiled
before, as it is kept from simulation to simulation; what compiling takes is told in a row of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
DEVICES, ROUNDS = 200, 5


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    """Rows of the rounds, and the seconds."""
    devices = DEVICES // 10 if quick else DEVICES
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        compiled, _ = _run(root / "first", root / "program", 4, 1)
        seconds, said = _run(root / "simulation", root / "program", devices, ROUNDS)
    rows: list[Row] = [{"what": "first simulation, compile included", "devices": 4, "rounds": 1, "seconds": compiled}]
    rows += [
        {"what": "round", **{name: told[name] for name in ("number", "accuracy", "counted", "bytes", "seconds")}}
        for told in said["rounds"]
    ]
    sent = said["rounds"][-1]["bytes"]
    return rows, {
        "simulate_seconds": seconds,
        "simulate_accuracy": said["rounds"][-1]["accuracy"],
        "simulate_weights_bytes": sent["weights"],
        "simulate_trajectory_bytes": sent["trajectory"],
    }


def _run(directory: Path, program: Path, devices: int, rounds: int) -> tuple[float, dict[str, Any]]:
    command = [sys.executable, "-m", "simulation", "--json", "--devices", str(devices), "--rounds", str(rounds)]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--program", str(program), str(directory)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return time.monotonic() - began, json.loads(done.stdout)
