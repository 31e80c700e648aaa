"""`bench agent`, idle and loop: the cost of the agent without a job, of the training loop, and its memory."""

import os
import time
from pathlib import Path

from bench.agent.kills import JOB, fake_server, recorded_steps, start_agent
from bench.programs import MOVIES, CompiledProgram, compile_cold, smollm2_recipe
from bench.result import Claims, Measurement, notes
from bench.runner import cpu_seconds
from bench.tiny import plan_of
from device_agent.executors.process import Launcher
from device_agent.executors.python import PythonLauncher
from device_agent.executors.runner import RunnerLauncher
from device_agent.training.run import train_run
from device_agent.training.run_directory import ResourceUsage, RunDirectory
from device_agent.training.run_plan import RunPlan
from shared.training_settings import TrainingSettings

STEPS, QUICK_STEPS, WARM = 24, 6, 2
EVALUATED = 8  # records of a split
SETTLE_SECONDS, IDLE_SECONDS, QUICK_IDLE_SECONDS = 5.0, 60.0, 10.0


def idle(directory: Path, dataset: Path, quick: bool) -> Measurement:
    """Measures an agent without a job: resident bytes, and its share of a core."""
    with fake_server(directory) as (server, home):
        process = start_agent(home, dataset)
        try:
            server.wait_for(lambda: server.lease_requests)
            time.sleep(SETTLE_SECONDS)
            cpu_before, start = cpu_seconds(process), time.monotonic()
            time.sleep(QUICK_IDLE_SECONDS if quick else IDLE_SECONDS)
            cpu, seconds = cpu_seconds(process) - cpu_before, time.monotonic() - start
            memory = process.memory_info().rss
        finally:
            process.terminate()
            process.wait()
    return [], {"idle_rss_bytes": memory, "idle_core_share": cpu / seconds}


def loop(root: Path, programs_directory: Path, runner: Path, quick: bool) -> Measurement:
    """Measures the loop's share of a step, and memory of both executors, int8 and fp32."""
    steps = QUICK_STEPS if quick else STEPS
    claims: Claims = {}
    notes.print("compiling SmolLM2-135M")
    programs = {
        precision: compile_cold(smollm2_recipe(precision=precision), programs_directory / precision)
        for precision in ("int8", "fp32")
    }
    gradient_recipe = smollm2_recipe(precision="int8", estimator="gradient", queries=1, layers="last:12")
    gradient = compile_cold(gradient_recipe, programs_directory / "gradient")
    native = RunnerLauncher(runner)
    for name, program in (("native", programs["int8"]), ("gradient", gradient)):
        plan = plan_of(program, MOVIES, training(steps))
        claims[f"loop_share_outside_{name}"] = share_outside_program(native, plan, root / f"loop-{name}")
    claims["agent_processor_share_training"] = agent_share(programs["int8"], root / "agent", steps)
    launchers: tuple[Launcher, ...] = (native, PythonLauncher())
    for precision, program in programs.items():
        for each in launchers:
            usage = resource_usage(each, plan_of(program, MOVIES, training(3)), root / f"{precision}-{each.name}")
            share = usage.peak_rss_bytes / program.size("weights")
            claims[f"peak_rss_over_weights_{each.name}_{precision}"] = share
    return [], claims


def training(steps: int) -> TrainingSettings:
    """Returns settings with evaluations only at both ends, of few records: only steps are timed."""
    return TrainingSettings(
        steps=steps, evaluation_interval=steps, seed=3, lr=1e-3, validation_limit=EVALUATED, test_limit=EVALUATED
    )


def share_outside_program(launcher: Launcher, plan: RunPlan, path: Path) -> float:
    """Returns the share of a step outside the program's call, the mean over a run.

    The training process measures both times in the same steps, so that noise affects both. Outside the call are the
    batch sampler, packing, the trajectory with its fsync, and progress. A run of WARM steps is subtracted, since its
    first step loads the program. What it wrote (the packed weights) is on the disk before the other run begins.
    """
    warm_up = resource_usage(
        launcher, plan.model_copy(update={"training": training(WARM)}), path.with_name(f"{path.name}-warm")
    )
    os.sync()
    full_run = resource_usage(launcher, plan, path)
    outside = (full_run.train_seconds - full_run.program_seconds) - (warm_up.train_seconds - warm_up.program_seconds)
    return outside / (full_run.train_seconds - warm_up.train_seconds)


def resource_usage(launcher: Launcher, plan: RunPlan, path: Path) -> ResourceUsage:
    """Returns the times and the memory of a whole run."""
    run = RunDirectory(path)
    run.begin(plan)
    train_run(run, launcher, lambda _: None)
    return run.figures()


def agent_share(program: CompiledProgram, home: Path, steps: int) -> float:
    """Returns the share of a core that a whole agent takes beside its runner, while it trains."""
    marks: dict[int, tuple[float, float]] = {}
    with fake_server(home, program, training(steps)) as (_, agent_home):
        ledger = agent_home.run(JOB).trajectory
        agent = start_agent(agent_home, MOVIES, "--once", "--executor", "native")
        while agent.poll() is None:
            step_count = recorded_steps(ledger)
            if step_count in (WARM, steps) and step_count not in marks:
                marks[step_count] = (cpu_seconds(agent), time.perf_counter())
            time.sleep(0.01)
    (cpu, start), (cpu_after, end) = marks[WARM], marks[steps]
    return (cpu_after - cpu) / (end - start)
