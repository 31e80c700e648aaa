"""`bench registry`, replay: a trajectory read strictly, replayed in blocks and compared with B, on one core."""

import os
import statistics

import numpy as np

from bench.result import Measured, Row
from bench.timing import by_turns
from shared.zo.replay import replay
from shared.zo.trajectory import MAGIC, TrajectoryHeader, frame
from shared.zo.trajectory_reader import read_ledger

STEPS, QUERIES, SIZE = 1000, 4, 368_640  # D of SmolLM2-135M at rank 16 on q_proj and v_proj
ROUNDS, QUICK_ROUNDS = 5, 1
SEED = 5


def measure(quick: bool) -> Measured:
    """Returns a row for the verification and one for its reading, and the seconds of one verification."""
    data, start = _ledger(), np.zeros(SIZE, np.float32)
    adapter = replay(read_ledger(data), start).tobytes()

    def verify(_number: int) -> None:
        if replay(read_ledger(data), start).tobytes() != adapter:
            raise AssertionError("the replay does not yield the adapter")

    calls = {"verification": verify, "of these, reading": lambda _number: read_ledger(data)}
    rounds, cores = QUICK_ROUNDS if quick else ROUNDS, os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        seconds = by_turns(rounds, calls)
    finally:
        os.sched_setaffinity(0, cores)
    about = {"what": "replay", "steps": STEPS, "queries": QUERIES, "size_d": SIZE, "rounds": rounds}
    rows: list[Row] = [about | {"by": name, "seconds": statistics.median(s)} for name, s in seconds.items()]
    ratio = len(adapter) / len(data)
    rows.append({"what": "bytes", "trajectory": len(data), "adapter": len(adapter), "ratio": ratio})
    return rows, {"replay_seconds": rows[0]["seconds"], "adapter_vs_trajectory_bytes": ratio}


def _ledger() -> bytes:
    """Returns a run's file, with coefficients of the size that training yields."""
    recipe = {"recipe_id": "0" * 64, "noise": "rademacher", "queries": QUERIES, "size": SIZE}
    header = TrajectoryHeader(job_id="job", job_seed=SEED, **recipe)
    steps = np.random.default_rng(SEED).normal(scale=1e-4, size=(STEPS, QUERIES)).astype("<f4")
    frames = [frame(b"S", number, row.tobytes()) for number, row in enumerate(steps)]
    return b"".join([MAGIC, frame(b"H", 0, header.model_dump_json().encode()), *frames])
