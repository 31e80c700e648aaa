"""What the loop around the program costs on SmolLM2-135M, and the memory and start of both engines. Knows no server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from bench.giver import DATASET, JOB, Giver
from bench.kills import steps_in
from bench.programs import DATA, Compiled
from device_agent.engines import Engine
from device_agent.engines.choice import RUNNER_VARIABLE
from device_agent.engines.native import NativeEngine
from device_agent.engines.python import PythonEngine
from device_agent.journal import Figures, RunDirectory, RunPlan
from device_agent.state import HOME_VARIABLE
from shared.job import Progress, TrainingSettings

COUNTS = {"train": 200, "validation": 8, "test": 8}  # few to measure on: only steps are timed
WARM = 2  # steps


def reviews(directory: Path) -> Path:
    """A data set of real movie reviews."""
    directory.mkdir(parents=True)
    for split, count in COUNTS.items():
        lines = (DATA / f"{split}.jsonl").read_text().splitlines()[:count]
        (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def training(steps: int) -> TrainingSettings:
    """Evaluations at both ends only."""
    return TrainingSettings(steps=steps, evaluation_interval=steps, seed=3, lr=1e-3)


def share_outside(engine: Engine, plan: RunPlan, path: Path) -> tuple[float, float]:
    """(share, seconds): of a step, what the loop spends outside the program's call, and a step; means over a run.

    The process that trains takes both times itself, in the same steps, so neither noise nor another load stands
    between them. Outside lies all else: order, packing, ledger with its fsync, progress. A run of WARM steps is taken
    away, for in its first step the program is loaded.
    """
    first = figures(engine, plan.model_copy(update={"training": training(WARM)}), path.with_name(f"{path.name}-warm"))
    whole = figures(engine, plan, path)
    outside = (whole.train_seconds - whole.program_seconds) - (first.train_seconds - first.program_seconds)
    seconds = whole.train_seconds - first.train_seconds
    return outside / seconds, seconds / (plan.training.steps - WARM)


def figures(engine: Engine, plan: RunPlan, path: Path) -> Figures:
    """What a whole run spent."""
    run = RunDirectory(path)
    run.begin(plan)
    if engine.train(run, lambda _: None, lambda: False).result is None:
        raise RuntimeError("the run did not end")
    return run.figures()


def agent_seconds(program: Compiled, runner: Path, data: Path, home: Path, steps: int) -> tuple[float, float]:
    """Processor seconds and seconds of a step in a whole agent: its own, without the runner's."""
    with Giver(program, training(steps)) as giver:
        place = giver.enrol(home)
        environment = os.environ | {RUNNER_VARIABLE: str(runner), HOME_VARIABLE: str(place.path)}
        words = ["run", "--once", "--json", "--engine", "native", "--data", f"{DATASET}={data}"]
        nothing, ledger = subprocess.DEVNULL, place.run(JOB).ledger
        agent = psutil.Popen(
            [sys.executable, "-m", "device_agent", *words], env=environment, stdout=nothing, stderr=nothing
        )
        marks: dict[int, tuple[float, float]] = {}
        while agent.poll() is None:
            at = steps_in(ledger)
            if at in (WARM, steps) and at not in marks:
                used = agent.cpu_times()
                marks[at] = (used.user + used.system, time.perf_counter())
            time.sleep(0.01)
    (cpu, began), (cpu_after, ended) = marks[WARM], marks[steps]
    return (cpu_after - cpu) / (steps - WARM), (ended - began) / (steps - WARM)


def first_step(engine: str, runner: Path, plan: RunPlan, path: Path) -> dict[str, Any]:
    """Seconds from nothing to the first step that is told of, and the peak memory of a run of a few steps."""
    run = RunDirectory(path)
    run.begin(plan)
    first: list[float] = []

    def hear(progress: Progress) -> None:
        if progress.phase == "training" and not first:
            first.append(time.perf_counter() - began)

    chosen = NativeEngine(runner) if engine == "native" else PythonEngine()
    began = time.perf_counter()
    result = chosen.train(run, hear, lambda: False).result
    if result is None:
        raise RuntimeError("the run did not end")
    weights = plan.manifest.file("weights").size
    return {
        "what": "memory and start",
        "engine": engine,
        "precision": plan.manifest.recipe.precision,
        "peak_rss_bytes": result.peak_rss_bytes,
        "weights_bytes": weights,
        "peak_rss_over_weights": result.peak_rss_bytes / weights,
        "seconds_to_first_step": first[0],
    }
