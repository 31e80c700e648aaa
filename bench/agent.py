"""`bench agent`: what the device agent survives and what it costs.

Kills: bench.kills and bench.phone_kills. The loop around the program: bench.overhead. Idle: the agent as an operator
starts it, with a server that has no job and holds each request as long as it may.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import psutil
import typer

from bench import overhead
from bench.giver import DATASET, Giver
from bench.kills import Daemon, Finals, Kind, Trainer, measure
from bench.phone_kills import PhoneRunner, forgetting, phone
from bench.programs import Compiled, compile_cold, reopen, smollm2_recipe
from bench.result import write
from bench.step import notes, show
from bench.tiny import compile_tiny, plan_of, write_base, write_sentences
from device_agent.engines.choice import RUNNER_VARIABLE
from device_agent.engines.native import NativeEngine
from device_agent.engines.python import PythonEngine
from device_agent.runner_build import build_runner
from device_agent.runner_place import RunnerPlace
from device_agent.state import HOME_VARIABLE
from shared.job import TrainingSettings

TRAINING = TrainingSettings(steps=400, evaluation_interval=50, seed=7)
ON_PHONE = TRAINING.model_copy(update={"steps": 60, "evaluation_interval": 20})
TRIALS = {"native": (130, 34), "python": (12, 8), "adb": (8, 8)}  # of the trainer, of the daemon; the slow ones fewer
QUICK = 10  # times fewer
SETTLE_SECONDS, IDLE_SECONDS, QUICK_IDLE_SECONDS = 5.0, 60.0, 10.0

Row = dict[str, Any]


class Part(StrEnum):
    """What may be measured alone."""

    IDLE = "idle"
    LOOP = "loop"
    KILLS = "kills"


def agent(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result here")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a tenth of the kills, and shorter looks")] = False,
    programs: Annotated[Path | None, typer.Option("--programs", help="keep compiled programs here")] = None,
    only: Annotated[list[Part] | None, typer.Option("--only", help="these parts; default: all")] = None,
) -> None:
    """Kill the agent at random points, weigh it while idle, and time the loop around the program."""
    rows: list[Row] = []
    claims: dict[str, float] = {}
    # CMake and Ninja of this Python's environment come before the machine's, which may be too old.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    runner = ready_runner()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        sentences, kept = write_sentences(root / "sentences"), programs or root / "programs"
        for part in only or list(Part):
            notes.print(part)
            if part is Part.IDLE:
                rows.append(idle(root / "idle", sentences, QUICK_IDLE_SECONDS if quick else IDLE_SECONDS))
                claims |= {"idle_rss_bytes": rows[-1]["rss_bytes"], "idle_core_share": rows[-1]["core_share"]}
            elif part is Part.LOOP:
                measure_loop(root, kept, runner, 6 if quick else 24, rows, claims)
            else:
                base = write_base(root / "base")
                tiny = once(kept / "tiny", partial(compile_tiny, base))
                measure_kills(root / "kills", tiny, sentences, runner, QUICK if quick else 1, rows, claims)
    show(claims)
    write(json_file, rows, claims)


def once(directory: Path, make: Callable[[Path], Compiled]) -> Compiled:
    """The program in `directory`, compiled there if it is not."""
    return reopen(directory) if (directory / "manifest.json").exists() else make(directory)


def ready_runner() -> Path:
    """The native runner of these sources, built once a machine."""
    place = RunnerPlace(Path(platformdirs.user_cache_dir("mobizo-bench")))
    return place.find() or build_runner(place, notes.print)


def idle(directory: Path, data: Path, seconds: float) -> Row:
    """An agent without a job: resident bytes, and its share of a core."""
    with Giver() as giver:
        home = giver.enrol(directory)
        words = ["run", "--json", "--data", f"{DATASET}={data}"]
        process = psutil.Popen(
            [sys.executable, "-m", "device_agent", *words],
            env=os.environ | {HOME_VARIABLE: str(home.path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while "leases" not in giver.heard:
                time.sleep(0.1)
            time.sleep(SETTLE_SECONDS)
            asked, before, began = len(giver.heard), process.cpu_times(), time.monotonic()
            time.sleep(seconds)
            after, watched = process.cpu_times(), time.monotonic() - began
            spent = after.user + after.system - before.user - before.system
            memory = process.memory_full_info()
        finally:
            process.terminate()
            process.wait()
    return {
        "what": "idle",
        "seconds": watched,
        "requests": len(giver.heard) - asked,
        "core_share": spent / watched,
        "rss_bytes": memory.rss,
        "own_bytes": memory.uss,
    }


def measure_loop(root: Path, kept: Path, runner: Path, steps: int, rows: list[Row], claims: dict[str, float]) -> None:
    """The loop's share of a step, and what both engines weigh; int8 and fp32."""
    notes.print("compiling SmolLM2-135M")
    programs = {
        precision: once(kept / precision, partial(compile_cold, smollm2_recipe(precision=precision)))
        for precision in ("int8", "fp32")
    }
    data = overhead.reviews(root / "reviews")
    notes.print("loop")
    plan = plan_of(programs["int8"], data, overhead.training(steps))
    for engine in (NativeEngine(runner), PythonEngine()):
        share, seconds = overhead.share_outside(engine, plan, root / f"loop-{engine.name}")
        rows.append(
            {"what": "loop", "engine": engine.name, "step_seconds": seconds, "share_outside_the_program": share}
        )
        claims[f"loop_share_outside_{engine.name}"] = share
    cpu, wall = overhead.agent_seconds(programs["int8"], runner, data, root / "agent", steps)
    rows.append({"what": "loop", "agent_processor_seconds_a_step": cpu, "step_seconds": wall})
    claims |= {
        "agent_processor_share_training": cpu / wall,
        "loop_overhead_share": claims["loop_share_outside_native"] + cpu / wall,
    }
    notes.print("memory")
    for precision, program in programs.items():
        for engine in ("native", "python"):
            plan = plan_of(program, data, overhead.training(3))
            rows.append(overhead.first_step(engine, runner, plan, root / f"{precision}-{engine}"))
            for name in ("peak_rss_over_weights", "seconds_to_first_step"):
                claims[f"{name}_{engine}_{precision}"] = rows[-1][name]


def measure_kills(
    root: Path, tiny: Compiled, data: Path, runner: Path, fewer: int, rows: list[Row], claims: dict[str, float]
) -> None:
    """The kill table."""
    environment = {RUNNER_VARIABLE: str(runner)}
    plan = plan_of(tiny, data, TRAINING)

    def trials(engine: str, which: int) -> int:
        return max(TRIALS[engine][which] // fewer, 1)

    def daemon(*words: str, path: str | None = None, training: TrainingSettings = TRAINING) -> Any:
        more = environment | ({"PATH": os.pathsep.join((path, os.environ["PATH"]))} if path else {})
        return lambda directory: Daemon(directory, tiny, data, training, words, more)

    native = Kind("native", "trainer", trials("native", 0), lambda directory: Trainer(directory, plan, runner))
    kinds = [
        Kind("python", "trainer", trials("python", 0), lambda directory: Trainer(directory, plan, None)),
        Kind("native", "daemon", trials("native", 1), daemon("--engine", "native")),
        Kind("python", "daemon", trials("python", 1), daemon("--engine", "python")),
    ]
    table: list[Row] = []

    def add(kind: Kind, expected: Finals | None) -> Finals:
        notes.print(f"kills: {kind.engine} {kind.killed}")
        row, found = measure(kind, root / f"{kind.engine}-{kind.killed}", expected)
        notes.print(row)
        table.append(row)
        return found

    expected = add(native, None)
    for kind in kinds:
        add(kind, expected)
    with phone() as found:
        if isinstance(found, str):
            table.extend(
                {"what": "kills", "engine": "adb", "killed": killed, "trials": 0, "skipped": found}
                for killed in ("trainer", "daemon")
            )
        else:
            slow = plan_of(tiny, data, ON_PHONE)
            there = forgetting(found, daemon("--engine", "adb", "--adb", found.serial, path=str(found.adb.parent)))
            add(
                Kind("adb", "trainer", trials("adb", 0), lambda d: PhoneRunner(d, slow, runner, found), alone=True),
                None,
            )
            add(Kind("adb", "daemon", trials("adb", 1), there, alone=True), expected)
    rows += table
    total = {name: sum(row.get(name, 0) for row in table) for name in ("trials", "kills", "mismatches")}
    claims |= {f"kill_{name}": value for name, value in total.items()} | {
        "kill_steps_computed_twice_beyond_one": sum(row.get("steps_computed_twice_beyond_one", 0) for row in table)
    }
