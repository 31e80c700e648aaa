"""`bench agent`, kills: runs killed with -9 at random moments and restarted until they end, against an undisturbed run.

A trial is one whole run with one or two kills, each at a moment drawn evenly from the time of an undisturbed run; a
moment after the run's end is drawn again. The result must be the same bytes.

A kill may cost one computed step that is not yet in the trajectory, because no step begins before the last one is on
the disk. More would show in two ways, and both are counted: a step that a process reported and the trajectory lacks
afterwards, and a trajectory that became shorter. A run with exact gradients computes the steps since its last
checkpoint again and does not report them.

The agent's server is the tests' fake one, with a device enrolled: it offers one job until that is completed, or none.
"""

import contextlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from bench.programs import Compiled
from bench.result import Row
from device_agent.engines import Engine
from device_agent.engines.child_process import prepare
from device_agent.errors import DoesNotFit
from device_agent.home import HOME_VARIABLE, AgentHome, DeviceConfig
from device_agent.training.journal import RunDirectory, RunPlan
from shared.canonical import file_sha256
from shared.job import Progress
from shared.protocol import LeaseRequest
from shared.signing import key_id, new_private_key, public_text
from shared.training_settings import TrainingSettings
from shared.zo.trajectory import parse_trajectory
from tests.device_agent.fake_server import FakeServer

DATASET, JOB = "movies", "job-1"


class LongPollServer(FakeServer):
    """Holds a request for work as long as the device allows, like the server does."""

    def _leases(self, body: bytes, parts: list[str]) -> object:
        found = super()._leases(body, parts)
        if found is None:
            self.changed.wait_for(lambda: self.jobs, LeaseRequest.model_validate_json(body).wait_seconds)
        return found


@contextmanager
def fake_server(
    directory: Path, program: Compiled | None = None, training: TrainingSettings | None = None
) -> Iterator[tuple[LongPollServer, AgentHome]]:
    """Yields the server, and the home of a device enrolled there. program: of the one job."""
    key = new_private_key()
    with LongPollServer(key, lease_seconds=5.0) as server:
        if program is not None and training is not None:
            server.add_job(program, DATASET, JOB, **training.model_dump(exclude_unset=True))
        home, public = AgentHome(directory), key.public_key()
        home.create()
        about = {"server": server.url, "name": "bench", "device_id": "device-1", "token": "token"}
        home.enroll(DeviceConfig(**about, public_key=public_text(public), key_id=key_id(public)))
        yield server, home


def start_agent(
    home: AgentHome, dataset: Path, *options: str, log: Path = Path(os.devnull), env: Mapping[str, str] = {}
) -> psutil.Popen:
    """Starts `mobizo-agent run` in a session of its own."""
    command = [sys.executable, "-m", "device_agent", "run", "--json", "--data", f"{DATASET}={dataset}", *options]
    environment = os.environ | env | {HOME_VARIABLE: str(home.path)}
    with log.open("ab") as output:
        return psutil.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


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
    _reached: int = field(default=0, repr=False)
    _told: set[int] = field(default_factory=set, repr=False)

    def add(self, work: Work) -> None:
        """Adds the work of a process that has ended."""
        self.kills += work.killed
        self.lost += max(max([self._reached, *work.told]) - work.ledger, 0)
        self._reached = work.ledger
        self.told_twice += len(work.told) - len(set(work.told) - self._told)
        self._told |= set(work.told)


class Victim(ABC):
    """One run that can be killed."""

    run: RunDirectory

    @abstractmethod
    def work(self, kill_after: float | None) -> Work:
        """Works until the run is done or was killed. kill_after: seconds from now, or None."""

    def close(self) -> None:  # noqa: B027  # most have nothing to end
        """Ends what was started for the run."""


class Trainer(Victim):
    """A run by an engine in this process, whose training process is killed."""

    def __init__(self, directory: Path, plan: RunPlan, engine: Engine) -> None:
        """directory: of this run alone."""
        self.run, self.engine = RunDirectory(directory / "run"), engine
        self.run.begin(plan)
        if engine.name != "python" and prepare(self.run) is not None:
            raise RuntimeError("the data was refused")

    def work(self, kill_after: float | None) -> Work:
        told: list[int] = []
        killed: list[bool] = []

        def hear(progress: Progress) -> None:
            if progress.phase == "training":
                told.append(progress.step)

        timer = threading.Timer(kill_after or 0.0, lambda: killed.append(self.kill()))
        if kill_after is not None:
            timer.start()
        done = False
        # An engine takes a kill for a lack of memory; the daemon tries again later.
        with contextlib.suppress(DoesNotFit):
            done = self.engine.train(self.run, hear, lambda: False).result is not None
        timer.cancel()
        if kill_after is not None:
            timer.join()
        return Work(done, any(killed) and not done, told, steps_in(self.run.ledger))

    def kill(self) -> bool:
        """Kills the training process with -9; returns whether there was one."""
        found = False
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if str(self.run.path) in child.cmdline():
                    child.kill()
                    found = True
        return found


class Daemon(Victim):
    """The whole agent, `mobizo-agent run`; every second kill hits all processes that it started."""

    def __init__(
        self, directory: Path, program: Compiled, dataset: Path, training: TrainingSettings, *options: str, **env: str
    ) -> None:
        """directory: of this run alone. options, env: of `mobizo-agent run`."""
        self._stack = contextlib.ExitStack()
        self._server, home = self._stack.enter_context(fake_server(directory / "home", program, training))
        self.run, self._log = home.run(JOB), directory / "log"
        self._start = partial(start_agent, home, dataset, "--once", *options, log=self._log, env=env)
        self._whole = False

    def work(self, kill_after: float | None) -> Work:
        process, killed = self._start(), False
        try:
            process.wait(kill_after)
        except psutil.TimeoutExpired:
            self._whole = not self._whole
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL) if self._whole else process.kill()
            killed = process.wait() == -signal.SIGKILL
        if not killed and (self._server.failures or not self._server.completions):
            log = self._log.read_text()[-2000:]
            raise RuntimeError(f"the agent ended with {process.returncode}, {self._server.failures}: {log}")
        return Work(not killed, killed, [], steps_in(self.run.ledger))

    def close(self) -> None:
        self._stack.close()


@dataclass(frozen=True)
class Kind:
    """A row of the table. make: creates a run in an empty directory."""

    engine: str
    estimator: str
    killed: str
    trials: int
    make: Callable[[Path], Victim]

    @property
    def name(self) -> str:
        """Returns a name for seeds and directories."""
        return f"{self.engine}-{self.estimator}-{self.killed}"


def left_alone(kind: Kind, directory: Path) -> tuple[Finals, float]:
    """Returns the files of an undisturbed run, and its seconds."""
    seconds = []
    for number in range(2):  # the first has cold caches
        with contextlib.closing(kind.make(_fresh(directory / f"alone-{number}"))) as victim:
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
        result, kills = Trial(), 1 + (rng.random() < SECOND_KILL)
        with contextlib.closing(kind.make(_fresh(directory))) as victim:
            for _ in range(MOST_STARTS):
                work = victim.work(rng.uniform(0, whole) if result.kills < kills else None)
                result.add(work)
                if work.done:
                    break
            else:
                raise RuntimeError(f"{kind.name}: the run does not end")
            result.same = finals(victim.run) == expected
        if result.kills:
            shutil.rmtree(directory)
            return result


def measure(kind: Kind, directory: Path, expected: Finals | None) -> tuple[Row, Finals]:
    """Returns a row of the table, and the files of an undisturbed run. expected: files of another kind."""
    found, whole = left_alone(kind, directory)
    wanted = expected or found
    numbers = range(kind.trials)
    with ThreadPoolExecutor(WORKERS) as pool:
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
    }
    return row, found


def _fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
