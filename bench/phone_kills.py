"""Kills over adb: the real adb client and a real adbd, which the tests' phone gives where this machine can."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.kills import Victim, Work, steps_in, told_steps
from device_agent.adb import Adb
from device_agent.engines.adb import AdbEngine
from device_agent.errors import DoesNotFit
from device_agent.journal import RunDirectory, RunPlan
from device_agent.phone import ROOT
from shared.trajectory import Limits

POLL_SECONDS = 0.05
REST = Limits(rest=20)  # so that the steps, and not the words with the phone, take most of the time
KILL = "p=$(pidof mobizo-runner) && kill -9 $p && echo killed"


@contextlib.contextmanager
def phone() -> Iterator[Any]:
    """A phone that is connected. Yields the reason, a str, where this machine can give none."""
    from tests.device_agent.adb.packages import Missing
    from tests.device_agent.adb.phone import Phone

    with tempfile.TemporaryDirectory() as directory:
        try:
            found = Phone(Path(directory))
        except Missing as error:
            yield str(error)
            return
        try:
            found.begin()
            yield found
            found.end()
        finally:
            found.close()


class PhoneRunner(Victim):
    """The runner on the phone, killed there; the engine here goes on."""

    def __init__(self, directory: Path, plan: RunPlan, runner: Path, phone: Any) -> None:
        super().__init__(directory)
        self._phone, self._job = phone, plan.job_id
        self._run = RunDirectory(directory / "run")
        self._run.begin(plan)
        self._run.limit(REST)
        self._engine = AdbEngine(Adb(phone.serial, phone.adb), runner, poll_seconds=POLL_SECONDS)
        forget(phone)

    @property
    def run(self) -> RunDirectory:
        return self._run

    def work(self, kill_after: float | None) -> Work:
        seen: list[tuple[list[int], int]] = []

        def kill() -> None:
            if "killed" not in self._phone.run(KILL):
                return
            there = self._phone.path(f"{ROOT}/runs/{self._job}")
            told: list[int] = []
            with contextlib.suppress(FileNotFoundError):  # another runner is being started
                told = told_steps((there / "out").read_bytes())
            seen.append((told, steps_in(there / "trajectory.bin")))

        timer = threading.Timer(kill_after, kill) if kill_after is not None else None
        if timer is not None:
            timer.start()
        done = False
        # Killed before its first step: to the engine that is want of memory, and the daemon tries again later.
        with contextlib.suppress(DoesNotFit):
            done = self._engine.train(self._run, lambda _: None, lambda: False).result is not None
        if timer is not None:
            timer.cancel()
            timer.join()
        if not seen:
            return Work(done, False, [], steps_in(self._run.ledger))
        return Work(done, True, *seen[0])


def forget(phone: Any) -> None:
    """Removes the runs on the phone; files that any run may use stay."""
    phone.run(f"kill -9 $(pidof mobizo-runner) 2>/dev/null; rm -rf {ROOT}/runs {ROOT}/aside")


def forgetting(phone: Any, make: Callable[[Path], Victim]) -> Callable[[Path], Victim]:
    """Has each run begin on a phone without runs."""

    def made(directory: Path) -> Victim:
        forget(phone)
        return make(directory)

    return made
