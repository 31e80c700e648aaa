"""What the loop around the program costs on SmolLM2-135M, and the memory and start of both engines. Knows no server.

The loop's own work is too small to see as a difference of two steps' times, so `loop_overhead_share` is a bound that
noise does not reach: the seconds of a whole step (program, order, packing, ledger with its fsync, progress) of a model
with next to no weights, on the same sentences at the same E, S and q, over a step of SmolLM2-135M. The difference is
measured too, by turns: a training runner that is halted after each step, and a served program on the same batches.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from bench.giver import DATASET, JOB, Giver
from bench.kills import steps_in
from bench.programs import DATA, Compiled
from bench.tiny import plan_of
from device_agent.data import Splits, read_splits
from device_agent.engines.choice import RUNNER_VARIABLE
from device_agent.engines.native import NativeEngine, prepare
from device_agent.engines.python import PythonEngine
from device_agent.journal import RunDirectory, RunPlan
from device_agent.order import ExampleOrder
from device_agent.runtimes.runner import RunnerRuntime, serve_command
from device_agent.state import HOME_VARIABLE
from device_agent.trainer import Trainer
from shared.encoding import pack_step
from shared.job import Progress, TrainingSettings
from shared.noise import query_seeds

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


def splits_of(plan: RunPlan) -> Splits:
    """The data of a plan, as training reads it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(plan.tokenizer))
    return read_splits(plan.dataset, plan.task, tokenizer, plan.manifest.recipe, plan.training)


def begin(path: Path, plan: RunPlan) -> RunDirectory:
    """A new run, ready for the native runner."""
    run = RunDirectory(path)
    run.begin(plan)
    if prepare(run) is not None:
        raise RuntimeError("the data was refused")
    return run


class Runner:
    """A training runner that is halted after each step that it tells of."""

    def __init__(self, runner: Path, run: RunDirectory) -> None:
        plan = run.plan()
        command = [str(runner / "mobizo-runner"), "train", "--attached", "--run", str(run.path)]
        command += ["--program", str(plan.program), "--weights", str(plan.weights)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._lines = self._told()

    def next_step(self) -> float:
        """Lets it go on until its next step is told; the seconds that took."""
        began = time.perf_counter()
        os.kill(self.process.pid, signal.SIGCONT)
        found = next(self._lines)
        os.kill(self.process.pid, signal.SIGSTOP)
        return found - began

    def _told(self) -> Iterator[float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = time.perf_counter()
            if json.loads(line).get("progress", {}).get("phase") == "training":
                yield found

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.communicate()


def by_turns(program: Compiled, runner: Path, data: Path, root: Path, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step in the loop, and of the same step by a served program."""
    plan = plan_of(program, data, training(steps + WARM))
    examples, recipe, seed = splits_of(plan).train, plan.manifest.recipe, plan.training.seed
    order = ExampleOrder(seed, tuple(example.correct for example in examples), recipe.effective_batch)
    eps = plan.training.eps_for(recipe)
    served = RunnerRuntime(plan.manifest, serve_command(runner, plan.program, plan.weights))
    trained = Runner(runner, begin(root / "by-turns", plan))
    loop, bare = [], []
    try:
        for step in range(steps + WARM):
            loop.append(trained.next_step())
            chosen = [examples[index] for index in order.indices(step)]
            batch = pack_step(chosen, recipe, dynamic=plan.manifest.dynamic_length)
            seeds = query_seeds(seed, step, recipe.queries)
            began = time.perf_counter()
            served.step(batch, seeds, plan.training.lr_at(step), eps)
            bare.append(time.perf_counter() - began)
    finally:
        trained.close()
        served.close()
    return loop[WARM:], bare[WARM:]


def runner_seconds(program: Compiled, runner: Path, data: Path, path: Path, steps: int) -> float:
    """Seconds of a step as the runner itself counts them, the ledger's fsync included: the mean."""
    run = begin(path, plan_of(program, data, training(steps)))
    result = NativeEngine(runner).train(run, lambda _: None, lambda: False).result
    if result is None:
        raise RuntimeError("the run did not end")
    return run.figures().train_seconds / steps


class Timed:
    """A runtime whose steps are timed."""

    def __init__(self, runtime: Any) -> None:
        self._runtime, self.inside = runtime, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def step(self, *arguments: Any) -> Any:
        """As the runtime's."""
        began = time.perf_counter()
        found = self._runtime.step(*arguments)
        self.inside += time.perf_counter() - began
        return found


def python_share(program: Compiled, data: Path, path: Path, steps: int) -> float:
    """The share of a step that Python's loop spends outside the program's call, the median over steps."""
    run, plan = RunDirectory(path), plan_of(program, data, training(steps))
    run.begin(plan)
    runtime = Timed(program.open())
    marks: list[tuple[float, float]] = []

    def hear(progress: Progress) -> None:
        if progress.phase == "training":
            progress.model_dump_json(exclude_none=True)  # what the training process says of it
            marks.append((time.perf_counter(), runtime.inside))

    Trainer(run, plan, splits_of(plan), runtime, hear, lambda: False).train()
    runtime.close()
    return statistics.median(1 - (b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(marks))


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
