"""Aggregation of a round of 10,000 LoRA-B files at D = 368,640: 14.7 GB read, hashed, checked and averaged.

Only a few files are written, and each stands for many members, so that reads come from the system's cache, as from a
fast disk. Each measurement is a process of its own; its peak resident memory includes Python, NumPy and the list of
members.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.result import Measurement
from bench.runner import run_module
from device_agent.memory import peak_rss_bytes
from shared.canonical import sha256_hex
from shared.federation.aggregation import Weighting, combine
from shared.federation.cohort import AggregatorSettings
from shared.federation.files import FileSource, UploadedFile
from shared.federation.intake import UpdateRequirements
from shared.federation.update import Contribution
from shared.zo.lora import adapter_file

SIZE = 368_640  # D of SmolLM2-135M at rank 16 on q_proj and v_proj
UPLOADS, QUICK_UPLOADS = 10_000, 500
FILES, QUICK_FILES = 64, 8
ROUNDS, QUICK_ROUNDS = 3, 1
THREADS = 2
A_SHA256 = "a" * 64
SCALE = 1e-3  # of B, as after training


def measure(quick: bool) -> Measurement:
    """Returns no rows, and the claims of some rounds in a process of its own each."""
    uploads, rounds = (QUICK_UPLOADS, QUICK_ROUNDS) if quick else (UPLOADS, ROUNDS)
    with tempfile.TemporaryDirectory() as name:
        size = uploads * _write(Path(name), QUICK_FILES if quick else FILES)
        measurements = [run_module("bench.federation.aggregate", [name, uploads]) for _ in range(rounds)]
    return [], {
        "aggregate_rss_bytes": max(each["peak_rss_bytes"] for each in measurements),
        "aggregate_bytes_per_second": size / statistics.median(each["seconds"] for each in measurements),
    }


def _write(directory: Path, count: int) -> int:
    """Writes some uploads; returns the bytes of one."""
    rng, data = np.random.default_rng(7), b""
    for number in range(count):
        flat = rng.normal(scale=SCALE, size=SIZE).astype(np.float32)
        data = adapter_file(flat, job_id=f"job-{number}", recipe_id="0" * 64, a_sha256=A_SHA256, step=150)
        (directory / sha256_hex(data)).write_bytes(data)
    return len(data)


def _prepare(directory: Path, uploads: int) -> Callable[[], None]:
    """Returns a function that aggregates the uploads; everything before the aggregation is done already."""
    hashes = sorted(path.name for path in directory.iterdir())
    names = [hashes[number % len(hashes)] for number in range(uploads)]
    start = np.random.default_rng(8).normal(scale=SCALE, size=SIZE).astype(np.float32)
    files = [
        UploadedFile(Contribution(f"member-{number:06}", examples=1 + number % 300), name, start)
        for number, name in enumerate(names)
    ]
    source = FileSource(
        files, UpdateRequirements(SIZE, A_SHA256), lambda name: (directory / name).open("rb", buffering=0), THREADS
    )

    def run() -> None:
        if combine(source, AggregatorSettings(name="mean"), Weighting(weights="examples")).count != uploads:
            raise AssertionError("not every update was counted")

    return run


if __name__ == "__main__":
    name, count = json.loads(sys.argv[1])
    aggregate = _prepare(Path(name), count)
    start = time.perf_counter()
    aggregate()
    print(json.dumps({"seconds": time.perf_counter() - start, "peak_rss_bytes": peak_rss_bytes()}))
