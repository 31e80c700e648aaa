"""Training on a phone: the runner works there by itself, and goes on while the link is down. Knows no server.

Both sides have the ledger: the phone's is the one that grows, the host's is a copy of its whole frames, fetched now and
then. Whichever holds more steps goes on, so a lost phone costs the steps since the last copy and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from device_agent.adb import Adb, Interrupted, PhoneAway, PhoneRefused, never
from device_agent.backoff import Backoff
from device_agent.engines.attendance import POLL_SECONDS, Attendance
from device_agent.engines.native import finish, prepare
from device_agent.journal import RunDirectory
from device_agent.messages import Message
from device_agent.phone import ROOT, RUNNER, Phone
from shared.canonical import file_sha256
from shared.job import Progress

LONGEST_BACKOFF = 30.0  # seconds between two tries to reach a phone that is away


class AdbEngine:
    """Each run by a `mobizo-runner` on the phone behind `adb`."""

    name = "adb"

    def __init__(self, adb: Adb, runner: Path, root: str = ROOT, poll_seconds: float = POLL_SECONDS) -> None:
        """runner: this machine's directory of a runner built for the phone. root: mobizo's directory on the phone.

        poll_seconds: between two looks at the phone.
        """
        self.phone = Phone(adb.apart(), root)
        self._runner, self._poll_seconds = runner, poll_seconds

    def train(self, run: RunDirectory, report: Callable[[Progress], None], stop: Callable[[], bool]) -> Message:
        """Trains a run; see `Engine.train`.

        A phone that is away when a run is new raises PhoneAway; one that has the run is waited for. Raises AdbMissing,
        PhoneFull, and WrongProcessor too.
        """
        refused = prepare(run)
        if refused is not None:
            return refused
        adb = self.phone.adb
        attendance = Attendance(self.phone, self._runner, run, report, self._poll_seconds)
        backoff = Backoff(self._poll_seconds, LONGEST_BACKOFF)
        adb.stop = stop
        try:
            while True:
                try:
                    message = attendance.attend(backoff.reset)
                    return self._conclude(run, attendance, message)
                except PhoneAway as error:
                    if not attendance.begun:
                        raise
                    report(attendance.progress.model_copy(update={"phase": "waiting", "why": error.detail[:500]}))
                    adb.pause(backoff.pause())
        except Interrupted:
            adb.stop = never
            attendance.stop()
            return Message(stopped=True)
        finally:
            adb.stop = never

    def clean(self, keep: Collection[str] = ()) -> None:
        """Removes from the phone what was not used for long. keep: sha256's of files that stay."""
        self.phone.clean(keep)

    def _conclude(self, run: RunDirectory, attendance: Attendance, message: Message) -> Message:
        if not message.trained:
            return message
        attendance.fetch()
        message = finish(run, message)
        # The result is here: what stays on the phone now goes when the next run ends.
        with suppress(Interrupted, PhoneAway, PhoneRefused):
            attendance.remove()
            self.clean({file.sha256 for file in run.plan().manifest.files})
        return message


def serve_command(phone: Phone, runner: Path, program: Path, weights: Path) -> tuple[str, ...]:
    """The command of a runner that serves a program's methods on the phone, which then has what it takes.

    Raises as `Phone.keep_runner` does.
    """
    phone.open()
    place = phone.keep_runner(runner)
    remote_program, remote_weights = (phone.keep(path, file_sha256(path)) for path in (program, weights))
    return phone.adb.shell_command(
        f"LD_LIBRARY_PATH={place}/lib exec {place}/{RUNNER} serve --program {remote_program} --weights {remote_weights}"
    )
