"""Runs that tests train, what ends them early, and what they leave."""

import contextlib
import shutil
from collections import Counter

import torch

from device_agent.errors import Stopped
from device_agent.executors.python import open_program
from device_agent.training.checkpointed_trainer import trainer_of
from device_agent.training.run import train_run
from device_agent.training.run_directory import RunDirectory
from shared.canonical import file_sha256
from shared.stop_signal import never
from shared.zo.lora import load_adapter
from shared.zo.trajectory import parse_trajectory

FILES = ("trajectory.bin", "best.safetensors", "last.safetensors")


def copy_run(source, target):
    shutil.copytree(source.path, target)
    return RunDirectory(target)


def hashes(run):
    return [file_sha256(run.path / name) for name in FILES]


def ledger(run):
    return parse_trajectory(run.trajectory.read_bytes())[0]


def recorded_steps(run):
    """Returns the number of steps in a run's ledger, which another process may be writing; 0 without its header."""
    trajectory = ledger(run) if run.trajectory.exists() else None
    return 0 if trajectory is None else trajectory.steps


def last_b(run, program):
    return load_adapter(run.last.read_bytes(), program.manifest.size)


def trained_steps(reports):
    return [progress.step for progress in reports if progress.phase == "training"]


def begun(path, plan):
    """Returns the run of a plan in a new directory."""
    run = RunDirectory(path)
    run.begin(plan)
    return run


def ignore(_progress):
    """A report to nobody."""


def fill_disk(filler):
    """Fills a disk to its last byte with a file."""
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def train(run, launcher, report=ignore):
    """Trains a run that was begun, by an executor, to its result."""
    return train_run(run, launcher, report)


def train_until(run, launcher, step):
    """Trains a run until it has reported a step."""
    reports = []
    try:
        train_run(run, launcher, reports.append, lambda: max(trained_steps(reports), default=0) >= step)
    except Stopped:
        return
    raise AssertionError(f"the run ended before step {step}")


def opened(plan, **options):
    """Opens the program of a plan in this process."""
    return open_program(plan.manifest, plan.program, plan.weights, **options)


def splits_of(plan, program):
    return program.splits(plan.dataset, plan.training, plan.task, with_test=not plan.uploads_last)


def train_in_process(run, plan, program, stop=never, report=ignore, runtime=None, **options):
    """Trains a run by a program in this process, which is closed after unless the caller opened it."""
    if not run.path.exists():
        run.begin(plan)
    used = runtime or opened(plan)
    try:
        splits = splits_of(plan, program)
        return trainer_of(plan.manifest)(run, plan, splits, used, report, stop, **options).train()
    finally:
        if runtime is None:
            used.close()


def answer_log_p(model, row):
    """Log-probability of each token of a row's answer (tokens,), by the stock model."""
    logs = model(torch.tensor([row.tokens])).logits[0].log_softmax(-1)
    return torch.stack([logs[place, token] for place, token in row.targets])


def after_calls(calls):
    """Returns a stop that comes at the n-th time it is asked."""
    rest = iter(range(calls))
    return lambda: next(rest, None) is None


def count_calls(program):
    """Returns the numbers of calls of a program's methods, which are counted from now on."""
    calls, call = Counter(), program._call

    def counted(method, *inputs):
        calls[method] += 1
        return call(method, *inputs)

    program._call = counted
    return calls


class Killed(BaseException):
    """What ends a process in the middle of a call; nothing after it runs."""


class DyingProgram:
    """A program whose process dies at the n-th call."""

    def __init__(self, program, calls):
        self._program, self._calls = program, calls

    def __getattr__(self, name):
        if name == "usage":  # is asked by the clock
            return self._program.usage

        def call(*arguments):
            self._calls -= 1
            if self._calls < 0:
                raise Killed
            return getattr(self._program, name)(*arguments)

        return call


def train_with_kills(run, plan, program, longest):
    """Trains a run to its result by a process that dies again and again, at most after `longest` calls."""
    runtime, kills, result, reports = opened(plan, resident=True), 0, None, []
    while result is None:
        try:
            # Each process lives a little longer than it takes to load, so that there is progress now and then.
            dying = DyingProgram(runtime, 1 + kills % longest)
            result = train_in_process(run, plan, program, report=reports.append, runtime=dying)
        except Killed:
            kills += 1
            assert kills < 500
    runtime.close()
    assert kills > 10
    steps = trained_steps(reports)
    assert steps == sorted(set(steps))  # no recorded step was computed again
    return result
