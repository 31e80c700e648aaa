"""Verification of a trajectory: read strictly, replayed in blocks and compared with B, on one core, as the server does.

`plain` is the element-wise replay of `shared.trajectory`, over a twentieth of the steps and counted twenty times; both
end at the same bytes there. Seconds are of the wall and, beside them, of the processor, with one core to run on.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from shared.ledger import read_ledger
from shared.lora import F32
from shared.replay import replay
from shared.trajectory import MAGIC, TrajectoryHeader, frame

STEPS, QUERIES, SIZE = 1000, 4, 368_640  # D of SmolLM2-135M at rank 16 on q_proj and v_proj
ROUNDS, QUICK_ROUNDS = 5, 1
FEW = 20  # the plain replay takes this part of the steps
SEED = 5
Row = dict[str, Any]


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    """A row for each way to replay, and the seconds of one verification."""
    data, start = _ledger(), np.zeros(SIZE, np.float32)
    run = read_ledger(data)
    adapter = replay(run, start).tobytes()
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with _one_core():
        read = [_timed(lambda: read_ledger(data)) for _ in range(rounds)]
        verified = [_timed(lambda: _verify(data, start, adapter)) for _ in range(rounds)]
        plain = _timed(lambda: run.replay(start, STEPS // FEW))
    if run.replay(start, STEPS // FEW).tobytes() != replay(run, start, STEPS // FEW).tobytes():
        raise AssertionError("the two replays differ")
    shape = {"steps": STEPS, "queries": QUERIES, "size_d": SIZE}
    rows: list[Row] = [
        {"what": "replay", "by": "verification", **shape, "rounds": rounds, **_seconds(verified)},
        {"what": "replay", "by": "of these, reading", **shape, "rounds": rounds, **_seconds(read)},
        {"what": "replay", "by": "plain", **shape, "rounds": 1, **_seconds([(FEW * plain[0], FEW * plain[1])])},
        {"what": "bytes", "trajectory": len(data), "adapter": len(adapter), "ratio": len(adapter) / len(data)},
    ]
    return rows, {
        "replay_seconds": rows[0]["seconds"],
        "replay_plain_vs_blocks": rows[2]["cpu_seconds"] / rows[0]["cpu_seconds"],
        "adapter_vs_trajectory_bytes": len(adapter) / len(data),
    }


def _ledger() -> bytes:
    """A run's file with coefficients of the size that training makes."""
    header = TrajectoryHeader(
        job_id="job", job_seed=SEED, recipe_id="0" * 64, noise="rademacher", queries=QUERIES, size=SIZE
    )
    rng = np.random.default_rng(SEED)
    steps = rng.normal(scale=1e-4, size=(STEPS, QUERIES)).astype("<f4")
    frames = [frame(b"S", number, row.tobytes()) for number, row in enumerate(steps)]
    return b"".join([MAGIC, frame(b"H", 0, header.model_dump_json().encode()), *frames])


def _verify(data: bytes, start: F32, adapter: bytes) -> None:
    if replay(read_ledger(data), start).tobytes() != adapter:
        raise AssertionError("the replay does not yield the adapter")


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the wall and of the processor."""
    began = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def _seconds(timings: list[tuple[float, float]]) -> Row:
    return {
        "seconds": statistics.median(wall for wall, _ in timings),
        "cpu_seconds": statistics.median(cpu for _, cpu in timings),
    }


@contextmanager
def _one_core() -> Iterator[None]:
    """Leaves this process one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
