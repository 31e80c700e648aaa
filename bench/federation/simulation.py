"""The duration of `mobizo simulate`: 200 virtual devices, 5 rounds, the built-in base.

The whole command in a process of its own, with Python's start, workers, plots and report. The program is compiled
before, as it is kept between simulations; compiling has a row of its own.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.result import Measured, Row

DEVICES, ROUNDS = 200, 5


def measure(quick: bool) -> Measured:
    """Returns rows of the rounds, and the seconds of the whole command."""
    devices = DEVICES // 10 if quick else DEVICES
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        compiled, _ = _run(root / "first", root / "program", 4, 1)
        seconds, output = _run(root / "simulation", root / "program", devices, ROUNDS)
    rows: list[Row] = [{"what": "first simulation, compile included", "devices": 4, "rounds": 1, "seconds": compiled}]
    rows += [
        {"what": "round", **{name: one[name] for name in ("number", "accuracy", "counted", "bytes", "seconds")}}
        for one in output["rounds"]
    ]
    sent = output["rounds"][-1]["bytes"]
    return rows, {
        "simulate_seconds": seconds,
        "simulate_accuracy": output["rounds"][-1]["accuracy"],
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
