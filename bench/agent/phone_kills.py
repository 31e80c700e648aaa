"""`bench agent`, kills over adb: the real adb client and a real adbd, from the tests' phone."""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.agent.kills import Victim, Work, steps_in, told_steps
from device_agent.android.adb import Adb
from device_agent.android.phone import ROOT
from device_agent.engines.adb import AdbEngine
from device_agent.errors import DoesNotFit
from device_agent.training.journal import RunDirectory, RunPlan
from shared.zo.trajectory import Limits
from tests.device_agent.android.packages import Missing
from tests.device_agent.android.phone import Phone

POLL_SECONDS = 0.05
REST = Limits(rest=20)  # so that steps take most of the time, not the talk with the phone
KILL = "p=$(pidof mobizo-runner) && kill -9 $p && echo killed"


@contextlib.contextmanager
def phone() -> Iterator[Any]:
    """Yields a connected phone, or the reason (str) why this machine cannot provide one."""
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
    """The runner on the phone, killed there; the engine here continues."""

    def __init__(self, directory: Path, plan: RunPlan, runner: Path, phone: Any) -> None:
        super().__init__(directory)
        self._phone, self._job = phone, plan.job_id
        self.run = RunDirectory(directory / "run")
        self.run.begin(plan)
        self.run.limit(REST)
        self._engine = AdbEngine(Adb(phone.serial, phone.adb), runner, poll_seconds=POLL_SECONDS)
        forget(phone)

    def work(self, kill_after: float | None) -> Work:
        seen: list[tuple[list[int], int]] = []

        def kill() -> None:
            if "killed" not in self._phone.run(KILL):
                return
            there = self._phone.path(f"{ROOT}/runs/{self._job}")
            told: list[int] = []
            with contextlib.suppress(FileNotFoundError):  # another runner starts
                told = told_steps((there / "out").read_bytes())
            seen.append((told, steps_in(there / "trajectory.bin")))

        timer = threading.Timer(kill_after, kill) if kill_after is not None else None
        if timer is not None:
            timer.start()
        done = False
        # The engine takes a kill before the first step for a lack of memory; the daemon tries again later.
        with contextlib.suppress(DoesNotFit):
            done = self._engine.train(self.run, lambda _: None, lambda: False).result is not None
        if timer is not None:
            timer.cancel()
            timer.join()
        if not seen:
            return Work(done, False, [], steps_in(self.run.ledger))
        return Work(done, True, *seen[0])


def forget(phone: Any) -> None:
    """Removes the runs on the phone; files that runs share stay."""
    phone.run(f"kill -9 $(pidof mobizo-runner) 2>/dev/null; rm -rf {ROOT}/runs {ROOT}/aside")
