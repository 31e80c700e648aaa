"""`bench agent`, kills over adb: the real adb client and a real adbd, from the tests' phone."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.agent.kills import Trainer, Work, steps_in
from device_agent.android.adb import Adb
from device_agent.android.phone import ROOT
from device_agent.engines.adb import AdbEngine
from device_agent.training.journal import RunPlan
from device_agent.training.messages import TrainerMessage
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


class PhoneRunner(Trainer):
    """The runner on the phone, killed there; the engine here continues."""

    def __init__(self, directory: Path, plan: RunPlan, runner: Path, phone: Any) -> None:
        engine = AdbEngine(Adb(phone.serial, phone.adb), runner, poll_seconds=POLL_SECONDS)
        super().__init__(directory, plan, engine)
        self._phone, self._there = phone, phone.path(f"{ROOT}/runs/{plan.job_id}")
        self._seen: list[tuple[list[int], int]] = []  # by a kill
        self.run.limit(REST)
        forget(phone)

    def kill(self) -> bool:
        if "killed" not in self._phone.run(KILL):
            return False
        told: list[int] = []
        with contextlib.suppress(FileNotFoundError):  # another runner starts
            lines = (self._there / "out").read_bytes().split(b"\n")[:-1]  # the last one may be torn
            messages = [TrainerMessage.model_validate_json(line).progress for line in lines]
            told = [each.step for each in messages if each is not None and each.phase == "training"]
        self._seen.append((told, steps_in(self._there / "trajectory.bin")))
        return True

    def work(self, kill_after: float | None) -> Work:
        found = super().work(kill_after)
        return Work(found.done, True, *self._seen.pop()) if self._seen else replace(found, told=[])


def forget(phone: Any) -> None:
    """Removes the runs on the phone; files that runs share stay."""
    phone.run(f"kill -9 $(pidof mobizo-runner) 2>/dev/null; rm -rf {ROOT}/runs {ROOT}/aside")
