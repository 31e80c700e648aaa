"""`bench agent`, idle and loop: the cost of the agent without a job, of the training loop, and its memory."""

import time
from pathlib import Path

from bench.agent.kills import JOB, fake_server, start_agent, steps_in
from bench.programs import MOVIES, Compiled, compile_cold, smollm2_recipe
from bench.result import Claims, Measured, Row, notes
from bench.runner import cpu_seconds
from bench.tiny import plan_of
from device_agent.engines import Engine
from device_agent.engines.child_process import NativeEngine, PythonEngine
from device_agent.programs import packed_path
from device_agent.runner.location import RUNNER_VARIABLE
from device_agent.training.journal import ResourceUsage, RunDirectory, RunPlan
from shared.training_settings import TrainingSettings

COUNTS = {"train": 200, "validation": 8, "test": 8}  # few to evaluate, since only steps are timed
STEPS, QUICK_STEPS, WARM = 24, 6, 2
SETTLE_SECONDS, IDLE_SECONDS, QUICK_IDLE_SECONDS = 5.0, 60.0, 10.0


def idle(directory: Path, dataset: Path, quick: bool) -> Measured:
    """Measures an agent without a job: resident bytes, and its share of a core."""
    with fake_server(directory) as (server, home):
        process = start_agent(home, dataset)
        try:
            server.wait_for(lambda: server.asked)
            time.sleep(SETTLE_SECONDS)
            asked, before, began = len(server.calls), cpu_seconds(process), time.monotonic()
            time.sleep(QUICK_IDLE_SECONDS if quick else IDLE_SECONDS)
            spent, seconds = cpu_seconds(process) - before, time.monotonic() - began
            memory = process.memory_full_info()
        finally:
            process.terminate()
            process.wait()
    row = {
        "what": "idle",
        "seconds": seconds,
        "requests": len(server.calls) - asked,
        "core_share": spent / seconds,
        "rss_bytes": memory.rss,
        "own_bytes": memory.uss,
    }
    return [row], {"idle_rss_bytes": row["rss_bytes"], "idle_core_share": row["core_share"]}


def loop(root: Path, kept: Path, runner: Path, quick: bool) -> Measured:
    """Measures the loop's share of a step, and memory of both engines, int8 and fp32."""
    steps = QUICK_STEPS if quick else STEPS
    rows: list[Row] = []
    claims: Claims = {}
    notes.print("compiling SmolLM2-135M")
    programs = {
        precision: compile_cold(smollm2_recipe(precision=precision), kept / precision) for precision in ("int8", "fp32")
    }
    data = reviews(root / "reviews")
    plan = plan_of(programs["int8"], data, training(steps))
    for engine in (NativeEngine(runner), PythonEngine()):
        share, seconds = share_outside(engine, plan, root / f"loop-{engine.name}")
        row = {"what": "loop", "engine": engine.name, "step_seconds": seconds, "share_outside_the_program": share}
        rows.append(row)
        claims[f"loop_share_outside_{engine.name}"] = share
    cpu, wall = agent_seconds(programs["int8"], runner, data, root / "agent", steps)
    rows.append({"what": "loop", "agent_processor_seconds_a_step": cpu, "step_seconds": wall})
    claims["agent_processor_share_training"] = cpu / wall
    claims["loop_overhead_share"] = claims["loop_share_outside_native"] + cpu / wall
    for precision, program in programs.items():
        for engine in (NativeEngine(runner), PythonEngine()):
            found = figures(engine, plan_of(program, data, training(3)), root / f"{precision}-{engine.name}")
            peak, weights = found.peak_rss_bytes, program.size("weights")
            about = {"what": "memory", "engine": engine.name, "precision": precision}
            rows.append(about | {"peak_rss_bytes": peak, "weights_bytes": weights})
            claims[f"peak_rss_over_weights_{engine.name}_{precision}"] = peak / weights
        starts = starts_of(NativeEngine(runner), program, data, root / f"{precision}-starts")
        rows += [{"what": "start", "precision": precision, "load_seconds": seconds} for seconds in starts]
        claims[f"load_seconds_native_{precision}"] = starts[0]
        claims[f"load_seconds_again_native_{precision}"] = starts[1]
    return rows, claims


def starts_of(engine: Engine, program: Compiled, data: Path, path: Path) -> list[float]:
    """Returns the seconds that loading takes in a first run of a program and in a second one."""
    packed_path(program.path("weights")).unlink(missing_ok=True)
    plan = plan_of(program, data, training(1))
    return [figures(engine, plan, path.with_name(f"{path.name}-{number}")).load_seconds for number in (1, 2)]


def reviews(directory: Path) -> Path:
    """Writes a small data set of movie reviews."""
    directory.mkdir(parents=True)
    for split, count in COUNTS.items():
        lines = (MOVIES / f"{split}.jsonl").read_text().splitlines(keepends=True)[:count]
        (directory / f"{split}.jsonl").write_text("".join(lines))
    return directory


def training(steps: int) -> TrainingSettings:
    """Returns settings with evaluations only at both ends."""
    return TrainingSettings(steps=steps, evaluation_interval=steps, seed=3, lr=1e-3)


def share_outside(engine: Engine, plan: RunPlan, path: Path) -> tuple[float, float]:
    """Returns (share, seconds): of a step, the share outside the program's call, and the seconds; means over a run.

    The training process takes both times itself, in the same steps, so that noise affects both. Outside are order,
    packing, trajectory with its fsync, and progress. A run of WARM steps is subtracted, since its first step loads the
    program.
    """
    first = figures(engine, plan.model_copy(update={"training": training(WARM)}), path.with_name(f"{path.name}-warm"))
    whole = figures(engine, plan, path)
    outside = (whole.train_seconds - whole.program_seconds) - (first.train_seconds - first.program_seconds)
    seconds = whole.train_seconds - first.train_seconds
    return outside / seconds, seconds / (plan.training.steps - WARM)


def figures(engine: Engine, plan: RunPlan, path: Path) -> ResourceUsage:
    """Returns the times and the memory of a whole run."""
    run = RunDirectory(path)
    run.begin(plan)
    if engine.train(run, lambda _: None, lambda: False).result is None:
        raise RuntimeError("the run did not end")
    return run.figures()


def agent_seconds(program: Compiled, runner: Path, data: Path, home: Path, steps: int) -> tuple[float, float]:
    """Returns processor seconds (without the runner's) and seconds of a step in a whole agent."""
    marks: dict[int, tuple[float, float]] = {}
    with fake_server(home, program, training(steps)) as (_, place):
        ledger = place.run(JOB).ledger
        agent = start_agent(place, data, "--once", "--engine", "native", env={RUNNER_VARIABLE: str(runner)})
        while agent.poll() is None:
            at = steps_in(ledger)
            if at in (WARM, steps) and at not in marks:
                marks[at] = (cpu_seconds(agent), time.perf_counter())
            time.sleep(0.01)
    (cpu, began), (cpu_after, ended) = marks[WARM], marks[steps]
    return (cpu_after - cpu) / (steps - WARM), (ended - began) / (steps - WARM)
