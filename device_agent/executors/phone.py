"""Starts the runner on a phone behind adb, with its standard streams on this machine.

The files that the runner needs are pushed once; a run leaves nothing else on the phone. adbd ends the runner when the
link is lost, and the runner ends itself when adbd dies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from device_agent.android.adb import Adb, PhoneUnreachable
from device_agent.android.phone import EXEC_FAILED, RUNNER, Phone, start_failure
from device_agent.errors import DoesNotFit, ExecutorEnded
from device_agent.executors.process import Launcher
from device_agent.executors.runner import serve_options
from shared.canonical import file_sha256
from shared.errors import MobizoError
from shared.program import ProgramManifest
from shared.stop_signal import never

# Exit statuses of `adb shell`: of a program that a signal ended, and of adb itself if it does not reach the phone.
KILLED = 128 + 9
ENDED = (128 + 1, 128 + 15)  # by SIGHUP or SIGTERM, as when adbd or the phone shuts down
FAILED = 1
ADB_MESSAGES = ("adb: ", "error: ")


class PhoneLauncher(Launcher):
    """Starts executors on the phone behind `adb`."""

    name = "adb"

    def __init__(self, adb: Adb, runner: Path) -> None:
        """runner: local directory of a runner built for the phone."""
        self.phone = Phone(adb.separate())
        self._runner = runner

    def command(
        self, manifest: ProgramManifest, program: Path, weights: Path, resident: bool, stop: Callable[[], bool]
    ) -> list[str]:
        """Pushes the files that the phone lacks; returns the command that starts the runner there.

        Raises also RuntimeFailed, PhoneUnreachable, PhoneUnsuitable, and Untrusted if the weights have changed.
        """
        # `program` is the program or the inference file of the manifest.
        phone, hashes = self.phone, (file_sha256(program), manifest.file("weights").sha256)
        phone.adb.stop = stop
        try:
            phone.open()
            runner = phone.install_runner(self._runner)
            remote_program, remote_weights = map(phone.keep, (program, weights), hashes)
            phone.clean({*hashes, Path(runner).name})
            options = " ".join(serve_options(remote_program, remote_weights, resident=resident))
            # `exec`, so that the runner itself gets the signal by which adbd ends a command.
            script = f"umask 077; export LD_LIBRARY_PATH={runner}/lib; exec {runner}/{RUNNER} {options}"
            return phone.adb.shell_command(script)
        finally:
            phone.adb.stop = never

    def explain(self, status: int | None, tail: str) -> MobizoError:
        """Returns the exception for an executor that ended. status: of `adb shell`, which is the runner's unless the
        link was lost. tail: the end of its standard error.
        """
        if status == KILLED:
            return DoesNotFit("the phone killed the runner, probably out of memory; the run will resume")
        if status in EXEC_FAILED:
            return start_failure(tail)
        if status in ENDED:
            return PhoneUnreachable("the runner on the phone was ended; the run will resume")
        last = (tail.strip().splitlines() or [""])[-1]
        by_adb = last.startswith(ADB_MESSAGES)
        if status is None or status <= 0 or (status == FAILED and by_adb):
            return self.phone.adb.lost(last if by_adb else "")
        ended = f"the runner on the phone ended with status {status}"
        return ExecutorEnded(f"{ended}: {last[-300:]}", public=ended)
