"""The kill table: runs killed with -9 at random moments, started again until they end, compared with one left alone.

A trial is one whole run with one kill or several, each at a moment drawn evenly from the time that the whole run takes
when it is left alone; a moment that came after the run's end is drawn again. Knows no server but `Giver`.

A step that was computed when the kill came, but was not yet in the ledger, is computed again: one at most for a kill,
because no step begins before the last is on the disk. What would be more shows in two ways, and both are counted: a
step that a process had told of and the ledger lacks afterwards, and a ledger that is shorter than it was.
"""

from __future__ import annotations

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
from typing import Any, Self

from bench.giver import DATASET, JOB, Giver
from bench.programs import Compiled
from device_agent.engines.native import finish, prepare
from device_agent.journal import RunDirectory, RunPlan
from device_agent.messages import Message
from device_agent.state import HOME_VARIABLE
from shared.canonical import file_sha256
from shared.job import TrainingSettings
from shared.trajectory import parse_trajectory

FILES = ("trajectory.bin", "best.safetensors", "last.safetensors")
MOST_STARTS = 30  # of one run; more means that it does not come to an end
SEED = 4
SECOND_KILL = 0.4  # how often a run is killed once more
WORKERS = 2  # trials at once

Finals = dict[str, str]


def finals(run: RunDirectory) -> Finals:
    """The sha256 of each file that a finished run leaves."""
    return {name: file_sha256(run.path / name) for name in FILES}


def steps_in(ledger: Path) -> int:
    """Whole steps of a ledger."""
    found = parse_trajectory(ledger.read_bytes())[0] if ledger.exists() else None
    return 0 if found is None else found.steps


def told_steps(output: bytes) -> list[int]:
    """The steps that a process said it had done, in order; its last line may be torn."""
    lines = [Message.model_validate_json(line) for line in output.split(b"\n")[:-1]]
    return [line.progress.step for line in lines if line.progress is not None and line.progress.phase == "training"]


@dataclass(frozen=True)
class Work:
    """What a process did until it ended. told: steps that it said it had done. ledger: the steps in it after that."""

    done: bool
    killed: bool
    told: list[int]
    ledger: int


@dataclass
class Trial:
    """What became of one run. lost: steps told of that the ledger lacked after a kill, or that it had had before."""

    kills: int = 0
    lost: int = 0
    told_twice: int = 0
    same: bool = False
    seconds: float = 0.0
    _reached: int = field(default=0, repr=False)
    _told: set[int] = field(default_factory=set, repr=False)

    def note(self, work: Work) -> None:
        """A process has ended."""
        self.kills += work.killed
        self.lost += max(max([self._reached, *work.told]) - work.ledger, 0)
        self._reached = work.ledger
        self.told_twice += len(work.told) - len(set(work.told) - self._told)
        self._told |= set(work.told)


class Victim(ABC):
    """One kind of run and how it is killed. Leaving its context ends what it began."""

    def __init__(self, directory: Path) -> None:
        """directory: one of its own, for this run."""
        self.directory = directory

    @property
    @abstractmethod
    def run(self) -> RunDirectory:
        """Where the run is."""

    @abstractmethod
    def work(self, kill_after: float | None) -> Work:
        """Works on the run until it is done or was killed. kill_after: seconds from now; None to let it be."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Child(Victim):
    """A process that is started, waited for and killed."""

    @abstractmethod
    def start(self) -> subprocess.Popen[bytes]:
        """Starts it."""

    @abstractmethod
    def ended(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether the run is done, now that its process ended by itself. Raises RuntimeError if it cannot be."""

    def told(self) -> list[int]:
        """The steps that the last process told of."""
        return []

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kills it -9."""
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
        self._run = RunDirectory(directory / "run")
        self._run.begin(plan)
        if runner is not None and prepare(self._run) is not None:
            raise RuntimeError("the data was refused")

    @property
    def run(self) -> RunDirectory:
        return self._run

    def start(self) -> subprocess.Popen[bytes]:
        path, plan = str(self._run.path), self._plan
        command = [sys.executable, "-m", "device_agent.trainer_process", path]
        if self._runner is not None:
            command = [str(self._runner / "mobizo-runner"), "train", "--attached", "--run", path]
            command += ["--program", str(plan.program), "--weights", str(plan.weights)]
        with (self.directory / "out").open("wb") as out, (self.directory / "err").open("wb") as err:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err)

    def ended(self, process: subprocess.Popen[bytes]) -> bool:
        last = (self.directory / "out").read_bytes().strip().split(b"\n")[-1]
        message = Message.model_validate_json(last or b"{}")
        if self._runner is not None and message.trained:
            message = finish(self._run, message)
        if message.result is None:
            raise RuntimeError(f"the trainer ended with {last!r}: {(self.directory / 'err').read_text()[-500:]}")
        return True

    def told(self) -> list[int]:
        return told_steps((self.directory / "out").read_bytes())


class Daemon(Child):
    """The whole agent, `mobizo-agent run`: every second time with all that it started, else alone."""

    def __init__(
        self,
        directory: Path,
        program: Compiled,
        dataset: Path,
        training: TrainingSettings,
        engine: tuple[str, ...],
        environment: dict[str, str],
    ) -> None:
        """engine: options of `run`."""
        super().__init__(directory)
        self._giver = Giver(program, training)
        self._home = self._giver.enrol(directory / "home")
        self._words = ["run", "--once", "--json", "--data", f"{DATASET}={dataset}", *engine]
        self._environment = os.environ | environment | {HOME_VARIABLE: str(self._home.path)}
        self._whole = False

    @property
    def run(self) -> RunDirectory:
        return self._home.run(JOB)

    def start(self) -> subprocess.Popen[bytes]:
        with (self.directory / "log").open("ab") as log:
            command = [sys.executable, "-m", "device_agent", *self._words]
            return subprocess.Popen(command, stdout=log, stderr=log, env=self._environment, start_new_session=True)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        self._whole = not self._whole
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL) if self._whole else process.kill()

    def ended(self, process: subprocess.Popen[bytes]) -> bool:
        if self._giver.failed or not self._giver.completed:
            said = (self.directory / "log").read_text()[-2000:]
            raise RuntimeError(f"the agent ended with {process.returncode}, {self._giver.failed}: {said}")
        return True

    def __exit__(self, *_: object) -> None:
        self._giver.__exit__()


@dataclass(frozen=True)
class Kind:
    """A row of the table. make: a run in an empty directory. alone: only one at a time."""

    engine: str
    killed: str
    trials: int
    make: Callable[[Path], Victim]
    alone: bool = False


def left_alone(kind: Kind, directory: Path) -> tuple[Finals, float]:
    """What a run leaves that nobody kills, and its seconds."""
    seconds = []
    for number in range(2):  # the first has cold caches
        with kind.make(_fresh(directory / f"alone-{number}")) as victim:
            began = time.monotonic()
            done = victim.work(None).done
            seconds.append(time.monotonic() - began)
            if not done:
                raise RuntimeError(f"{kind.engine}: a run that nobody killed did not end")
            found = finals(victim.run)
    return found, min(seconds)


def trial(kind: Kind, directory: Path, rng: random.Random, expected: Finals, whole: float) -> Trial:
    """One run with at least one kill. whole: seconds of a run that is left alone."""
    while True:
        began, result, kills = time.monotonic(), Trial(), 1 + (rng.random() < SECOND_KILL)
        with kind.make(_fresh(directory)) as victim:
            for _ in range(MOST_STARTS):
                work = victim.work(rng.uniform(0, whole) if result.kills < kills else None)
                result.note(work)
                if work.done:
                    break
            else:
                raise RuntimeError(f"{kind.engine}, {kind.killed}: the run does not end")
            result.same = finals(victim.run) == expected
        result.seconds = time.monotonic() - began
        if result.kills:
            shutil.rmtree(directory)
            return result


def measure(kind: Kind, directory: Path, expected: Finals | None) -> tuple[dict[str, Any], Finals]:
    """A row of the table, and what a run that nobody killed left. expected: by another kind, to be equal to."""
    found, whole = left_alone(kind, directory)
    wanted = expected or found
    numbers = range(kind.trials)
    with ThreadPoolExecutor(1 if kind.alone else WORKERS) as pool:
        name = f"{SEED}-{kind.engine}-{kind.killed}"
        trials = list(
            pool.map(lambda n: trial(kind, directory / str(n), random.Random(f"{name}-{n}"), wanted, whole), numbers)
        )
    row = {
        "what": "kills",
        "engine": kind.engine,
        "killed": kind.killed,
        "trials": len(trials),
        "kills": sum(each.kills for each in trials),
        "mismatches": sum(not each.same for each in trials) + (found != wanted),
        "steps_computed_twice_beyond_one": sum(each.lost + each.told_twice for each in trials),
        "seconds_left_alone": whole,
        "seconds": sum(each.seconds for each in trials),
    }
    return row, found


def _fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
