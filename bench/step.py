"""What benchmarks of steps share: random batches, timing by turns, and the memory of a process that trains.

The command itself is `bench.step_command`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.programs import Compiled
from shared.encoding import pack_score, pack_step
from shared.noise import query_seeds
from shared.program import ProgramManifest
from shared.recipe import DEFAULT_EPS

LR = 1e-3
Batch = tuple[np.ndarray, ...]
notes = Console(stderr=True, highlight=False)


def random_batch(manifest: ProgramManifest, length: int, number: int) -> Batch:
    """A step's data inputs, of `length` tokens each, the answer after the last."""
    recipe, vocabulary = manifest.recipe, manifest.shape.vocabulary
    rng = np.random.default_rng(number)
    e, t, c = recipe.effective_batch, recipe.answer_length, recipe.choices
    tokens = rng.integers(0, vocabulary, (e, length))
    positions = np.full((e, t), length - 1)
    choices = rng.integers(0, vocabulary, (e, t, c))
    return tokens, positions, choices, np.ones((e, t, c), np.float32), np.ones((e, t), np.float32)


def by_turns(rounds: int, calls: Mapping[str, Callable[[int], Any]]) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` times by turns after one that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call(number)
            if number:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    """How many times faster, the median over turns."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


class Stepper:
    """One program's `step`, on random batches."""

    def __init__(self, program: Compiled, length: int) -> None:
        self.manifest, self.recipe, self.length = program.manifest, program.manifest.recipe, length
        self._methods = program.methods("step")
        self._scalars = (np.array([LR], np.float32), np.array([DEFAULT_EPS[self.recipe.precision]], np.float32))

    def __call__(self, number: int) -> np.ndarray:
        seeds = query_seeds(0, number, self.recipe.queries)
        return self._methods("step", *random_batch(self.manifest, self.length, number), seeds, *self._scalars)[0]


def peak_rss(directory: Path) -> int:
    """Peak resident bytes of a fresh process that alternates steps and scores on the program in `directory`."""
    done = subprocess.run([sys.executable, "-m", "bench.footprint", str(directory)], capture_output=True, check=True)
    return int(done.stdout.strip().splitlines()[-1])


def show(claims: Mapping[str, float]) -> None:
    """The claims as a table, on standard error."""
    table = Table("claim", "value")
    for name, value in claims.items():
        table.add_row(name, f"{value:,.0f}" if value >= 1000 else f"{value:.3g}")
    notes.print(table)


def footprint(directory: Path) -> int:
    """Runs steps and scores in this process and returns its peak resident bytes."""
    from bench.programs import reopen
    from device_agent.memory import peak_rss_bytes

    program = reopen(directory)
    manifest: ProgramManifest = program.manifest
    recipe = manifest.recipe
    examples = program.examples("train")[: recipe.score_rows]
    runtime = program.open()
    for number in range(2):
        batch = pack_step(examples[: recipe.effective_batch], recipe)
        runtime.step(batch, query_seeds(0, number, recipe.queries), LR, DEFAULT_EPS[recipe.precision])
        runtime.score(next(iter(pack_score(examples, recipe))).inputs)
    runtime.close()
    return peak_rss_bytes()
