"""`bench agent`, kills: runs killed with -9 at random moments and restarted until they end, against an undisturbed run.

A trial is one whole run with one or two kills, each at a moment drawn evenly from the time of an undisturbed run; a
moment after the run's end is drawn again. The result must be the same, byte for byte.

A kill may cost one computed step that is not yet in the trajectory, because no step begins before the previous one is
on the disk. A larger loss would show in two ways, and both are counted: the trajectory lacks a step that a process
reported, or the trajectory became shorter. A run with exact gradients recomputes the steps since its last checkpoint
and does not report them.

The agent's server is the tests' fake one, with an enrolled device. It offers one job until it is completed, or no job.
"""

import contextlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.programs import CompiledProgram
from bench.result import Row
from bench.tiny import enrolled_home
from device_agent.errors import DoesNotFit
from device_agent.executors.process import ExecutorProcess, Launcher
from device_agent.home import HOME_VARIABLE, AgentHome
from device_agent.training.run import train_run
from device_agent.training.run_directory import RunDirectory
from device_agent.training.run_plan import RunPlan
from shared.canonical import file_sha256
from shared.job import Progress
from shared.program import ProgramManifest
from shared.protocol import LeaseRequest
from shared.signing import new_private_key
from shared.training_settings import TrainingSettings
from shared.zo.trajectory import parse_trajectory
from tests.device_agent.fake_server import FakeServer

DATASET, JOB = "movies", "job-1"


class LongPollServer(FakeServer):
    """Answers a long poll when a job is ready or when the device's waiting time is over, as the server does."""

    def _leases(self, body: bytes, parts: list[str]) -> object:
        lease = super()._leases(body, parts)
        if lease is None:
            self.changed.wait_for(lambda: self.jobs, LeaseRequest.model_validate_json(body).wait_seconds)
        return lease


@contextmanager
def fake_server(
    directory: Path, program: CompiledProgram | None = None, training: TrainingSettings | None = None
) -> Iterator[tuple[LongPollServer, AgentHome]]:
    """Yields the server, and the home of a device enrolled there. program: of its only job; None: no job."""
    key = new_private_key()
    with LongPollServer(key, lease_seconds=5.0) as server:
        if program is not None and training is not None:
            server.add_job(program, DATASET, JOB, **training.model_dump(exclude_unset=True))
        yield server, enrolled_home(directory, key, server.url)


def start_agent(home: AgentHome, dataset: Path, *options: str, log: Path = Path(os.devnull)) -> psutil.Popen:
    """Starts `mobizo-agent run` in a session of its own."""
    command = [sys.executable, "-m", "device_agent", "run", "--json", "--data", f"{DATASET}={dataset}", *options]
    environment = os.environ | {HOME_VARIABLE: str(home.path)}
    with log.open("ab") as output:
        return psutil.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


FILES = ("trajectory.bin", "best.safetensors", "last.safetensors")
RECOMPUTED_STEPS = "steps_computed_twice_beyond_one"
MAX_STARTS = 30  # of one run; more means that it does not end
SEED = 4
SECOND_KILL_SHARE = 0.4  # share of runs that are killed twice
WORKERS = 2  # trials at once

FileHashes = dict[str, str]


def file_hashes(run: RunDirectory) -> FileHashes:
    """Returns the sha256 of each file of a finished run."""
    return {name: file_sha256(run.path / name) for name in FILES}


def recorded_steps(path: Path) -> int:
    """Returns the number of complete steps in a trajectory file."""
    trajectory = parse_trajectory(path.read_bytes())[0] if path.exists() else None
    return 0 if trajectory is None else trajectory.steps


@dataclass(frozen=True)
class Attempt:
    """The work of one process until it ended. recorded_steps: steps in the trajectory after its end."""

    done: bool
    killed: bool
    reported_steps: list[int]
    recorded_steps: int


@dataclass
class Trial:
    """The result of one run. lost: reported or recorded steps that the trajectory lacked after a kill."""

    kills: int = 0
    lost: int = 0
    reported_twice: int = 0
    identical: bool = False
    _recorded_steps: int = 0
    _reported_steps: set[int] = field(default_factory=set)

    def add(self, attempt: Attempt) -> None:
        """Adds the attempt of a process that has ended."""
        self.kills += attempt.killed
        self.lost += max(max([self._recorded_steps, *attempt.reported_steps]) - attempt.recorded_steps, 0)
        self._recorded_steps = attempt.recorded_steps
        self.reported_twice += len(attempt.reported_steps) - len(set(attempt.reported_steps) - self._reported_steps)
        self._reported_steps |= set(attempt.reported_steps)


class Loop(Launcher):
    """A run by the training loop in this process, whose executor is killed."""

    def __init__(self, plan: RunPlan, launcher: Launcher, directory: Path) -> None:
        """directory: of this run alone."""
        self.run, self._launcher = RunDirectory(directory / "run"), launcher
        self.name = launcher.name
        self._pid: int | None = None
        self.run.begin(plan)

    def launch(self, manifest: ProgramManifest, program: Path, weights: Path, **options: Any) -> ExecutorProcess:
        """Starts an executor and notes its process; see `Launcher.launch`."""
        executor = self._launcher.launch(manifest, program, weights, **options)
        self._pid = executor.pid
        return executor

    def command(
        self, manifest: ProgramManifest, program: Path, weights: Path, resident: bool, stop: Callable[[], bool]
    ) -> list[str]:
        """See `Launcher.command`."""
        return self._launcher.command(manifest, program, weights, resident, stop)

    def execute(self, kill_after: float | None) -> Attempt:
        """Executes the run until it is done or killed. kill_after: seconds from now; None: no kill."""
        reported_steps: list[int] = []
        killed: list[bool] = []
        self._pid = None

        def on_progress(progress: Progress) -> None:
            if progress.phase == "training":
                reported_steps.append(progress.step)

        timer = threading.Timer(kill_after or 0.0, lambda: killed.append(self.kill()))
        if kill_after is not None:
            timer.start()
        done = False
        # A killed executor is reported as out of memory; the daemon tries again later.
        with contextlib.suppress(DoesNotFit):
            train_run(self.run, self, on_progress)
            done = True
        timer.cancel()
        if kill_after is not None:
            timer.join()
        return Attempt(done, any(killed) and not done, reported_steps, recorded_steps(self.run.trajectory))

    def kill(self) -> bool:
        """Kills the executor with -9; returns whether there was one."""
        if self._pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
            return True
        return False

    def close(self) -> None:
        """Nothing else was started for the run."""


class Agent:
    """The whole agent, `mobizo-agent run`: the process of the loop is killed, alone or with its executor."""

    def __init__(
        self,
        program: CompiledProgram,
        dataset: Path,
        training: TrainingSettings,
        executor: str,
        both: bool,
        directory: Path,
    ) -> None:
        """both: kills the executor, too. directory: of this run alone."""
        self._stack = contextlib.ExitStack()
        self._server, home = self._stack.enter_context(fake_server(directory / "home", program, training))
        self.run, self._log = home.run(JOB), directory / "log"
        self._start = partial(start_agent, home, dataset, "--once", "--executor", executor, log=self._log)
        self._both = both

    def execute(self, kill_after: float | None) -> Attempt:
        """See `Loop.execute`."""
        process, killed = self._start(), False
        try:
            process.wait(kill_after)
        except psutil.TimeoutExpired:
            children = process.children() if self._both else []
            for each in (process, *children):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            killed = process.wait() == -signal.SIGKILL
        if not killed and (self._server.failures or not self._server.completions):
            log = self._log.read_text()[-2000:]
            raise RuntimeError(f"the agent ended with {process.returncode}, {self._server.failures}: {log}")
        return Attempt(not killed, killed, [], recorded_steps(self.run.trajectory))

    def close(self) -> None:
        """Stops the server."""
        self._stack.close()


CreateRun = Callable[[Path], Loop | Agent]  # in an empty directory


def run_undisturbed(create_run: CreateRun, directory: Path) -> tuple[FileHashes, float]:
    """Returns the files of an undisturbed run, and its seconds."""
    seconds = []
    for number in range(2):  # the first has cold caches
        with contextlib.closing(create_run(_empty_directory(directory / f"alone-{number}"))) as killable_run:
            start = time.monotonic()
            done = killable_run.execute(None).done
            seconds.append(time.monotonic() - start)
            if not done:
                raise RuntimeError("an undisturbed run did not end")
            hashes = file_hashes(killable_run.run)
    return hashes, min(seconds)


def trial(
    create_run: CreateRun, directory: Path, rng: random.Random, expected: FileHashes, undisturbed_seconds: float
) -> Trial:
    """Runs once with at least one kill."""
    while True:
        result, kills = Trial(), 1 + (rng.random() < SECOND_KILL_SHARE)
        with contextlib.closing(create_run(_empty_directory(directory))) as killable_run:
            for _ in range(MAX_STARTS):
                execute = killable_run.execute(rng.uniform(0, undisturbed_seconds) if result.kills < kills else None)
                result.add(execute)
                if execute.done:
                    break
            else:
                raise RuntimeError("the run does not end")
            result.identical = file_hashes(killable_run.run) == expected
        if result.kills:
            shutil.rmtree(directory)
            return result


def measure(
    name: str, create_run: CreateRun, count: int, directory: Path, expected: FileHashes | None
) -> tuple[Row, FileHashes]:
    """Returns a row of the table, and the files of an undisturbed run. expected: those of the program's first row."""
    hashes, undisturbed_seconds = run_undisturbed(create_run, directory)
    reference_hashes = expected or hashes

    def run(number: int) -> Trial:
        rng = random.Random(f"{SEED}-{name}-{number}")
        return trial(create_run, directory / str(number), rng, reference_hashes, undisturbed_seconds)

    with ThreadPoolExecutor(WORKERS) as pool:
        trials = list(pool.map(run, range(count)))
    row = {
        "scenario": name,
        "trials": count,
        "mismatches": sum(not result.identical for result in trials) + (hashes != reference_hashes),
        RECOMPUTED_STEPS: sum(result.lost + result.reported_twice for result in trials),
    }
    return row, hashes


def _empty_directory(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
