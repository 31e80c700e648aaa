"""Aggregation of a round of 10,000 LoRA-B files at D = 368,640: 14.7 GB read, hashed, checked and averaged.

Nobody's disk is filled for it: a few files are written, and each stands for many members, so that what is read comes
from the system's cache, as it would from a disk that is fast enough. Each measurement is a process of its own, whose
peak resident memory counts all of it: Python, NumPy, the list of members.

Floors, on as many threads: reading and sha256 alone, which nothing that checks a hash can beat; and a copy in memory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from device_agent.memory import peak_rss_bytes
from shared.canonical import sha256_hex
from shared.cohort import AggregatorSettings
from shared.federation.aggregation import Weighing, combine
from shared.federation.files import FileSource, UploadedFile
from shared.federation.intake import Rules
from shared.federation.update import Contribution
from shared.lora import adapter_file

SIZE = 368_640  # D of SmolLM2-135M at rank 16 on q_proj and v_proj
UPLOADS, QUICK_UPLOADS = 10_000, 500
ROBUST_UPLOADS, QUICK_ROBUST_UPLOADS = 200, 20
FILES, QUICK_FILES = 64, 8
ROUNDS, QUICK_ROUNDS = 3, 1
THREADS = 2
A_SHA256 = "a" * 64
SCALE = 1e-3  # of B, about what training makes
Row = dict[str, Any]


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    """Rows for the mean, its floors and the robust aggregators; the claims are the mean's, with all checks."""
    uploads, rounds = (QUICK_UPLOADS, QUICK_ROUNDS) if quick else (UPLOADS, ROUNDS)
    robust = QUICK_ROBUST_UPLOADS if quick else ROBUST_UPLOADS
    directory = Path(tempfile.mkdtemp(prefix="mobizo-bench-"))
    try:
        _write(directory, QUICK_FILES if quick else FILES)
        asked: list[tuple[str, int, Row]] = [
            ("mean", uploads, {"threads": THREADS}),
            ("mean", uploads, {"threads": 1}),
            ("read and hash", uploads, {"threads": THREADS}),
            ("read and hash", uploads, {"threads": 1}),
            ("copy", uploads, {"threads": THREADS}),
            *((name, robust, {"threads": THREADS}) for name in ("median", "trimmed_mean", "multi_krum")),
        ]
        rows = [_row(directory, what, count, how, rounds if count == uploads else 1) for what, count, how in asked]
    finally:
        shutil.rmtree(directory)
    mean, floor = rows[0], rows[2]
    return rows, {
        "aggregate_rss_bytes": mean["peak_rss_bytes"],
        "aggregate_bytes_per_second": mean["bytes_per_second"],
        "aggregate_vs_floor": mean["bytes_per_second"] / floor["bytes_per_second"],
    }


def _write(directory: Path, count: int) -> None:
    rng = np.random.default_rng(7)
    for number in range(count):
        flat = rng.normal(scale=SCALE, size=SIZE).astype(np.float32)
        data = adapter_file(flat, job_id=f"job-{number}", recipe_id="0" * 64, a_sha256=A_SHA256, step=150)
        (directory / sha256_hex(data)).write_bytes(data)


def _row(directory: Path, what: str, uploads: int, how: Row, rounds: int) -> Row:
    """The median of some rounds, each in a process of its own."""
    told = json.dumps({"directory": str(directory), "what": what, "uploads": uploads, **how})
    found = []
    for _ in range(rounds):
        command = [sys.executable, "-m", "bench.federation_aggregate", told]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    size = next(directory.iterdir()).stat().st_size
    seconds = statistics.median(each["seconds"] for each in found)
    return {
        "what": what,
        "uploads": uploads,
        "files": len([path for path in directory.iterdir() if len(path.name) == len(A_SHA256)]),
        "size_d": SIZE,
        **how,
        "rounds": rounds,
        "input_bytes": uploads * size,
        "seconds": seconds,
        "cpu_seconds": statistics.median(each["cpu_seconds"] for each in found),
        "bytes_per_second": uploads * size / seconds,
        "peak_rss_bytes": max(each["peak_rss_bytes"] for each in found),
    }


def _work(asked: Row) -> Callable[[], None]:
    """What is measured, ready to begin."""
    directory, what, uploads, threads = Path(asked["directory"]), asked["what"], asked["uploads"], asked["threads"]
    hashes = sorted(path.name for path in directory.iterdir() if len(path.name) == len(A_SHA256))
    names = [hashes[number % len(hashes)] for number in range(uploads)]
    if what == "read and hash":
        return lambda: _spread(names, threads, lambda name, _: _hash(directory / name))
    if what == "copy":
        data = (directory / hashes[0]).read_bytes()
        return lambda: _spread(names, threads, lambda _, buffer: buffer.__setitem__(slice(len(data)), data))
    start = np.random.default_rng(8).normal(scale=SCALE, size=SIZE).astype(np.float32)
    files = [
        UploadedFile(Contribution(f"member-{number:06}", examples=1 + number % 300), name, start)
        for number, name in enumerate(names)
    ]
    source = FileSource(files, Rules(SIZE, A_SHA256), lambda name: (directory / name).open("rb", buffering=0), threads)
    settings = AggregatorSettings(name=what, clip_norm=SCALE * SIZE**0.5, krum_f=uploads // 5)
    weighing = Weighing(by="examples" if what == "mean" else "equal")

    def run() -> None:
        if combine(source, settings, weighing).count != uploads:
            raise AssertionError("not every update was counted")

    return run


def _spread(names: list[str], threads: int, work: Callable[[str, bytearray], None]) -> None:
    """Every file once, by so many threads, each with a buffer of its own."""

    def share(first: int) -> None:
        buffer = bytearray(8 * SIZE)
        for name in names[first::threads]:
            work(name, buffer)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(share, range(threads)))


def _hash(path: Path) -> None:
    """As `file_sha256`, in pieces that stay in a core's cache, and with nothing else."""
    digest, piece = hashlib.sha256(), bytearray(256 << 10)
    view = memoryview(piece)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(view[:count])
    if digest.hexdigest() != path.name:
        raise AssertionError(f"{path} is damaged")


def _main() -> None:
    run = _work(json.loads(sys.argv[1]))
    began, cpu = time.perf_counter(), time.process_time()
    run()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    peak = peak_rss_bytes()
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_rss_bytes": peak}))


if __name__ == "__main__":
    _main()
