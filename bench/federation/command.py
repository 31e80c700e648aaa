"""`bench federation`: the cost of aggregating and simulating updates, and the benefit of a cohort.

- bytes: what one device sends in one round, in each form: the files themselves, before HTTP, created and not estimated.
  The keys and shares of a masked round are not included.
- simulate: the duration of `mobizo simulate`, 200 virtual devices, 5 rounds, the built-in base. The whole command in a
  process of its own, with Python's start, workers and report. The program is compiled before, as it is kept
  between simulations; compiling has a row of its own.
"""

import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bench.federation import aggregate, learning
from bench.federation.aggregate import SIZE
from bench.result import Measurement, Row
from bench.runner import JsonFile, Keep, Only, Quick, load_or_compute, run_parts
from mobizo.quickstart.processes import BIN
from shared.federation.secure_aggregation.fixed_point import vector_bytes
from shared.federation.secure_aggregation.settings import Bits, SecureAggregationParameters
from shared.zo.lora import adapter_file
from shared.zo.trajectory import MAGIC, Evaluation, TrajectoryHeader, frame


def federation(json_file: JsonFile = None, quick: Quick = False, only: Only = None, keep: Keep = None) -> None:
    """Aggregate, simulate, and train a cohort of the real model, with and without privacy."""
    with tempfile.TemporaryDirectory() as name:
        directory = keep or Path(name)
        parts: dict[str, Callable[[bool], Measurement]] = {
            "aggregate": aggregate.measure,
            "bytes": upload_sizes,
            "simulate": measure_simulation,
            # The cohort without privacy is the same for both parts and is trained once.
            "warm-start": partial(learning.warm_start, directory=directory),
            "privacy": partial(learning.privacy, directory=directory),
        }
        kept = {
            part: lambda quick, part=part: load_or_compute(directory / f"{part}.json", partial(parts[part], quick))
            for part in parts
        }
        run_parts(kept, json_file, quick, only)


STEPS, QUERIES, INTERVAL = 150, 4, 25  # a job's defaults


def upload_sizes(quick: bool) -> Measurement:
    """Returns a row for each form. quick: has no effect."""
    empty = np.zeros(SIZE, np.float32)
    weights = len(adapter_file(empty, job_id="j" * 32, recipe_id="0" * 64, a_sha256="0" * 64, step=1))
    trajectory = trajectory_bytes(SIZE, STEPS, QUERIES, INTERVAL)
    forms: list[Row] = [{"form": "weights", "bytes": weights}, {"form": "trajectory", "bytes": trajectory}]
    masked_bits: tuple[Bits, ...] = (32, 64)  # in a round of at most 256 devices of equal weight
    for bits in masked_bits:
        parameters = SecureAggregationParameters(
            cohort="cohort",
            round=1,
            start_sha256=None,
            recipe_id="0" * 64,
            size=SIZE,
            clip=1.0,
            most_members=256,
            minimum=3,
            threshold="two-thirds",
            bits=bits,
        )
        forms.append({"form": "masked", "bits": bits, "bytes": vector_bytes(parameters)})
    columns = {"what": "upload", "size_d": SIZE, "steps": STEPS, "queries": QUERIES}
    return [columns | form for form in forms], {"weights_vs_trajectory_bytes": weights / trajectory}


def trajectory_bytes(size: int, steps: int, queries: int, interval: int) -> int:
    """Returns the bytes of the trajectory of a run that validates every `interval` steps."""
    header = TrajectoryHeader(
        job_id="j" * 32, job_seed=2**53 - 1, recipe_id="0" * 64, noise="rademacher", queries=queries, size=size
    )
    step = frame(b"S", 0, bytes(4 * queries))
    evaluation = Evaluation(step=steps, split="validation", correct=100, total=200, loss=2 / 3)
    notes = (steps // interval + 1) * len(frame(b"E", 0, evaluation.model_dump_json().encode()))
    return len(MAGIC) + len(frame(b"H", 0, header.model_dump_json().encode())) + steps * len(step) + notes


SIMULATED, SIMULATED_ROUNDS = 200, 5


def measure_simulation(quick: bool) -> Measurement:
    """Returns no rows, and the seconds of the whole command, whose program an earlier one has compiled."""
    devices = SIMULATED // 10 if quick else SIMULATED
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _simulate(root / "first", root / "program", 4, 1)  # compiles the program
        return [], {"simulate_seconds": _simulate(root / "simulation", root / "program", devices, SIMULATED_ROUNDS)}


def _simulate(directory: Path, program: Path, devices: int, rounds: int) -> float:
    command = [str(BIN / "mobizo"), "simulate", "--json", "--devices", str(devices), "--rounds", str(rounds)]
    start = time.monotonic()
    process = subprocess.run(
        [*command, "--program", str(program), str(directory)], capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise SystemExit(process.stderr[-2000:])
    return time.monotonic() - start
