"""`bench agent`, kills: runs killed with -9 at random moments and restarted until they end, against an undisturbed run.

A trial is one whole run with one or two kills, each at a moment drawn evenly from the time of an undisturbed run; a
moment after the run's end is drawn again. The result must be the same bytes.

A kill may cost one computed step that is not yet in the trajectory, because no step begins before the last one is on
the disk. More would show in two ways, and both are counted: a step that a process reported and the trajectory lacks
afterwards, and a trajectory that became shorter. A run with exact gradients computes the steps since its last
checkpoint again and does not report them.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from bench.agent.server import DATASET, JOB, fake_server
from bench.programs import Compiled
from bench.result import Row
from device_agent.engines.child_process import finish, prepare
from device_agent.home import HOME_VARIABLE
from device_agent.training.journal import RunDirectory, RunPlan
from device_agent.training.messages import TrainerMessage
from shared.canonical import file_sha256
from shared.job import TrainingSettings
from shared.zo.trajectory import parse_trajectory

FILES = ("trajectory.bin", "best.safetensors", "last.safetensors")
TWICE = "steps_computed_twice_beyond_one"
MOST_STARTS = 30  # of one run; more means that it does not end
SEED = 4
SECOND_KILL = 0.4  # share of runs that are killed twice
WORKERS = 2  # trials at once

Finals = dict[str, str]


def finals(run: RunDirectory) -> Finals:
    """Returns the sha256 of each file of a finished run."""
    return {name: file_sha256(run.path / name) for name in FILES}


def steps_in(ledger: Path) -> int:
    """Returns the whole steps of a trajectory file."""
    found = parse_trajectory(ledger.read_bytes())[0] if ledger.exists() else None
    return 0 if found is None else found.steps


def told_steps(output: bytes) -> list[int]:
    """Returns the steps that a process reported, in order; its last line may be torn."""
    lines = [TrainerMessage.model_validate_json(line) for line in output.split(b"\n")[:-1]]
    return [line.progress.step for line in lines if line.progress is not None and line.progress.phase == "training"]


@dataclass(frozen=True)
class Work:
    """What a process did until it ended. told: steps that it reported. ledger: steps in the trajectory after that."""

    done: bool
    killed: bool
    told: list[int]
    ledger: int


@dataclass
class Trial:
    """The outcome of one run. lost: reported or written steps that the trajectory lacked after a kill."""

    kills: int = 0
    lost: int = 0
    told_twice: int = 0
    same: bool = False
    seconds: float = 0.0
    _reached: int = field(default=0, repr=False)
    _told: set[int] = field(default_factory=set, repr=False)

    def note(self, work: Work) -> None:
        """Adds the work of a process that has ended."""
        self.kills += work.killed
        self.lost += max(max([self._reached, *work.told]) - work.ledger, 0)
        self._reached = work.ledger
        self.told_twice += len(work.told) - len(set(work.told) - self._told)
        self._told |= set(work.told)


class Victim(ABC):
    """One run that can be killed. Leaving its context ends what it started."""

    run: RunDirectory

    def __init__(self, directory: Path) -> None:
        """directory: of this run alone."""
        self.directory = directory

    @abstractmethod
    def work(self, kill_after: float | None) -> Work:
        """Works until the run is done or was killed. kill_after: seconds from now, or None."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Child(Victim):
    """A process that is started, awaited and killed."""

    @abstractmethod
    def start(self) -> subprocess.Popen[bytes]:
        """Starts the process."""

    @abstractmethod
    def ended(self, process: subprocess.Popen[bytes]) -> bool:
        """Returns whether the run is done, after its process ended by itself. Raises RuntimeError if it failed."""

    def told(self) -> list[int]:
        """Returns the steps that the last process reported."""
        return []

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kills the process with -9."""
        process.kill()

    def work(self, kill_after: float | None) -> Work:
        process = self.start()
        try:
            process.wait(kill_after)
            killed = False
        except subprocess.TimeoutExpired:
            self.kill(process)
            killed = process.wait() == -signal.SIGKILL
        if process.stdin is not None:
            process.stdin.close()
        return Work(not killed and self.ended(process), killed, self.told(), steps_in(self.run.ledger))


class Trainer(Child):
    """The training process alone: the native runner, or Python's."""

    def __init__(self, directory: Path, plan: RunPlan, runner: Path | None) -> None:
        """runner: the native runner's directory; None for Python."""
        super().__init__(directory)
        self._plan, self._runner = plan, runner
        self.run = RunDirectory(directory / "run")
        self.run.begin(plan)
        if runner is not None and prepare(self.run) is not None:
            raise RuntimeError("the data was refused")

    def start(self) -> subprocess.Popen[bytes]:
        path, plan = str(self.run.path), self._plan
        command = [sys.executable, "-m", "device_agent.training.trainer_process", path]
        if self._runner is not None:
            command = [str(self._runner / "mobizo-runner"), "train", "--attached", "--run", path]
            command += ["--program", str(plan.program), "--weights", str(plan.weights)]
        with (self.directory / "out").open("wb") as out, (self.directory / "err").open("wb") as err:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err)

    def ended(self, process: subprocess.Popen[bytes]) -> bool:
        last = (self.directory / "out").read_bytes().strip().split(b"\n")[-1]
        message = TrainerMessage.model_validate_json(last or b"{}")
        if self._runner is not None and message.trained:
            message = finish(self.run, message)
        if message.result is None:
            raise RuntimeError(f"the trainer ended with {last!r}: {(self.directory / 'err').read_text()[-500:]}")
        return True

    def told(self) -> list[int]:
        return told_steps((self.directory / "out").read_bytes())


class Daemon(Child):
    """The whole agent, `mobizo-agent run`; every second kill hits all processes that it started."""

    def __init__(
        self, directory: Path, program: Compiled, dataset: Path, training: TrainingSettings, *options: str, **env: str
    ) -> None:
        """options, env: of `mobizo-agent run`."""
        super().__init__(directory)
        self._stack = contextlib.ExitStack()
        self._server, home = self._stack.enter_context(fake_server(directory / "home", program, training))
        self.run = home.run(JOB)
        self._command = [sys.executable, "-m", "device_agent", "run", "--once", "--json", *options]
        self._command += ["--data", f"{DATASET}={dataset}"]
        self._environment = os.environ | env | {HOME_VARIABLE: str(home.path)}
        self._whole = False

    def start(self) -> subprocess.Popen[bytes]:
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        self._whole = not self._whole
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL) if self._whole else process.kill()

    def ended(self, process: subprocess.Popen[bytes]) -> bool:
        if self._server.failures or not self._server.completions:
            log = (self.directory / "log").read_text()[-2000:]
            raise RuntimeError(f"the agent ended with {process.returncode}, {self._server.failures}: {log}")
        return True

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@dataclass(frozen=True)
class Kind:
    """A row of the table. make: creates a run in an empty directory. alone: one at a time.

    same: its bytes are those of the other rows of its estimator.
    """

    engine: str
    estimator: str
    killed: str
    trials: int
    make: Callable[[Path], Victim]
    alone: bool = False
    same: bool = True

    @property
    def name(self) -> str:
        """Returns a name for seeds and directories."""
        return f"{self.engine}-{self.estimator}-{self.killed}"


def left_alone(kind: Kind, directory: Path) -> tuple[Finals, float]:
    """Returns the files of an undisturbed run, and its seconds."""
    seconds = []
    for number in range(2):  # the first has cold caches
        with kind.make(_fresh(directory / f"alone-{number}")) as victim:
            began = time.monotonic()
            done = victim.work(None).done
            seconds.append(time.monotonic() - began)
            if not done:
                raise RuntimeError(f"{kind.name}: an undisturbed run did not end")
            found = finals(victim.run)
    return found, min(seconds)


def trial(kind: Kind, directory: Path, rng: random.Random, expected: Finals, whole: float) -> Trial:
    """Runs once with at least one kill. whole: seconds of an undisturbed run."""
    while True:
        began, result, kills = time.monotonic(), Trial(), 1 + (rng.random() < SECOND_KILL)
        with kind.make(_fresh(directory)) as victim:
            for _ in range(MOST_STARTS):
                work = victim.work(rng.uniform(0, whole) if result.kills < kills else None)
                result.note(work)
                if work.done:
                    break
            else:
                raise RuntimeError(f"{kind.name}: the run does not end")
            result.same = finals(victim.run) == expected
        result.seconds = time.monotonic() - began
        if result.kills:
            shutil.rmtree(directory)
            return result


def measure(kind: Kind, directory: Path, expected: Finals | None) -> tuple[Row, Finals]:
    """Returns a row of the table, and the files of an undisturbed run. expected: files of another kind."""
    found, whole = left_alone(kind, directory)
    wanted = expected or found
    numbers = range(kind.trials)
    with ThreadPoolExecutor(1 if kind.alone else WORKERS) as pool:
        seed = f"{SEED}-{kind.name}"
        trials = list(
            pool.map(lambda n: trial(kind, directory / str(n), random.Random(f"{seed}-{n}"), wanted, whole), numbers)
        )
    row = {
        "what": "kills",
        "engine": kind.engine,
        "estimator": kind.estimator,
        "killed": kind.killed,
        "trials": len(trials),
        "kills": sum(each.kills for each in trials),
        "mismatches": sum(not each.same for each in trials) + (found != wanted),
        TWICE: sum(each.lost + each.told_twice for each in trials),
        "seconds_left_alone": whole,
        "seconds": sum(each.seconds for each in trials),
    }
    return row, found


def _fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
