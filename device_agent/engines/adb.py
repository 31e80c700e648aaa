"""Trains on a phone, where the runner works on its own and continues while the link is down.

The phone's trajectory grows; the host fetches copies of its complete frames. The longer of the two is continued, so
that a lost phone costs only the steps since the last copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from device_agent.android.adb import Adb, Interrupted, PhoneRefused, PhoneUnreachable, never
from device_agent.android.phone import ROOT, Phone
from device_agent.durable import disk_full_as_does_not_fit
from device_agent.engines.child_process import finish, prepare
from device_agent.engines.remote_run_monitor import POLL_SECONDS, RemoteRunMonitor
from device_agent.protocol.client import Backoff
from device_agent.training.journal import RunDirectory
from device_agent.training.messages import TrainerMessage
from shared.job import Progress

LONGEST_BACKOFF = 30.0  # seconds between two tries to reach a phone that is away


class AdbEngine:
    """Trains each run with a `mobizo-runner` on the phone behind `adb`."""

    name = "adb"

    def __init__(self, adb: Adb, runner: Path, root: str = ROOT, poll_seconds: float = POLL_SECONDS) -> None:
        """runner: local directory of a runner built for the phone. root: mobizo's directory on the phone.

        poll_seconds: interval between polls of the phone.
        """
        self.phone = Phone(adb.separate(), root)
        self._runner, self._poll_seconds = runner, poll_seconds

    def train(self, run: RunDirectory, report: Callable[[Progress], None], stop: Callable[[], bool]) -> TrainerMessage:
        """Trains a run; see `Engine.train`.

        Waits for an unreachable phone if the run has already started there. Raises PhoneUnreachable otherwise,
        AdbMissing, PhoneFull, NothingRuns and WrongProcessor.
        """
        with disk_full_as_does_not_fit():
            return prepare(run) or self._train(run, report, stop)

    def _train(self, run: RunDirectory, report: Callable[[Progress], None], stop: Callable[[], bool]) -> TrainerMessage:
        adb = self.phone.adb
        monitor = RemoteRunMonitor(self.phone, self._runner, run, report, self._poll_seconds)
        backoff = Backoff(self._poll_seconds, LONGEST_BACKOFF)
        adb.stop = stop
        try:
            while True:
                try:
                    message = monitor.follow(backoff.reset)
                    return self._build_result(run, monitor, message)
                except PhoneUnreachable as error:
                    if not monitor.begun:
                        raise
                    report(monitor.progress.model_copy(update={"phase": "waiting", "why": error.detail[:500]}))
                    adb.pause(backoff.pause())
        except Interrupted:
            adb.stop = never
            monitor.stop()
            return TrainerMessage(stopped=True)
        finally:
            adb.stop = never

    def clean(self, keep: Collection[str] = ()) -> None:
        """Removes files from the phone that were not used recently. keep: sha256 of files to keep."""
        self.phone.clean(keep)

    def _build_result(self, run: RunDirectory, monitor: RemoteRunMonitor, message: TrainerMessage) -> TrainerMessage:
        if not message.trained:
            return message
        monitor.fetch()
        message = finish(run, message)
        # The result is here: what stays on the phone now goes when the next run ends.
        with suppress(Interrupted, PhoneUnreachable, PhoneRefused):
            monitor.remove()
            self.clean({file.sha256 for file in run.plan().manifest.files})
        return message
