"""Monitors one run on a phone: starts it, follows its output and copies its trajectory.

Every method may raise PhoneUnreachable and may be called again later, because the state is read anew from the phone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from device_agent.android.adb import PhoneRefused, PhoneUnreachable
from device_agent.android.phone import Phone
from device_agent.android.phone_run import MOST_BYTES, PhoneRun, RemoteRunState
from device_agent.durable import write_durably
from device_agent.errors import DoesNotFit, RuntimeFailed
from device_agent.training.journal import ResourceUsage, RunDirectory
from device_agent.training.messages import TrainerMessage
from shared.canonical import file_sha256
from shared.errors import Conflict
from shared.job import Progress
from shared.zo.trajectory import Trajectory, parse_trajectory

POLL_SECONDS = 1.0  # between two looks at the phone
COLLECT_SECONDS = 15.0  # between two copies of the ledger
KILLED = 128 + 9  # a shell's status of a process that was killed


class RemoteRunRecord(BaseModel):
    """Records on which phone a run was started. before: usage of earlier processes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    serial: str
    before: ResourceUsage


class RemoteRunMonitor:
    """One run, on the phone and in its local directory."""

    def __init__(
        self, phone: Phone, runner: Path, run: RunDirectory, report: Callable[[Progress], None], poll_seconds: float
    ) -> None:
        """runner: directory of a runner for the phone. report: called with the newest progress of each poll."""
        self._phone, self._runner, self._run, self._report = phone, runner, run, report
        self._poll_seconds = poll_seconds
        self._plan = run.plan()
        self._phone_run = PhoneRun(phone.adb, phone.run(self._plan.job_id))
        self._record_path = run.path / "phone.json"
        self._attachment = self._read_record()
        self.progress = Progress(phase="loading", steps=self._plan.training.steps)
        self._limits: bytes | None = None  # as the phone has them
        self._started_size: int | None = None  # of the ledger when a runner was last started from here
        self._collected_at = 0.0
        self._output_size, self._part = 0, b""  # bytes of the runner's output, and the line that they end in
        self._last: TrainerMessage | None = None  # its last message other than progress
        self._usage: ResourceUsage | None = None

    @property
    def begun(self) -> bool:
        """Whether the run was ever started on a phone."""
        return self._attachment is not None

    def follow(self, on_poll: Callable[[], None]) -> TrainerMessage:
        """Follows the run to its final message, trained or error. on_poll: called after each successful poll.

        Starts or restarts the runner if none is alive. Raises Interrupted, PhoneFull, NothingRuns, WrongProcessor,
        DoesNotFit if the runner was killed before its first step, RuntimeFailed if it exited without a message.
        """
        adb = self._phone.adb
        adb.preferred = None if self._attachment is None else self._attachment.serial
        self._phone.open()
        self._phone_run.create()
        if self._attachment is None or self._attachment.serial != adb.device():
            self._attach()
        self._forget()
        self._limits = None
        self._agree()
        while True:
            look = self._look()
            on_poll()
            if not look.alive:
                message = self._ended(look)
                if message is not None:
                    return message
                self._start(look)
                continue
            self._push_limits()
            if time.monotonic() - self._collected_at > COLLECT_SECONDS:
                self._collect(look)
            if len(look.out) < MOST_BYTES:
                adb.pause(self._poll_seconds)

    def stop(self) -> None:
        """Stops the runner and copies the trajectory; on an unreachable phone the run continues."""
        if not self.begun:
            return
        try:
            self._phone_run.stop()
            self._collect(self._look())
        except (PhoneUnreachable, PhoneRefused):
            return

    def fetch(self) -> None:
        """Copies the complete trajectory and both B files of a trained run."""
        self._collect(self._look())
        for name in ("best.f32", "last.f32"):
            self._phone.fetch(f"{self._phone_run.directory}/{name}", self._run.path / name)

    def remove(self) -> None:
        """Removes the run from the phone, and its local record."""
        self._phone_run.remove()
        self._record_path.unlink(missing_ok=True)
        self._attachment = None

    def _look(self) -> RemoteRunState:
        """Returns the state of the run and handles the runner's messages since the last look."""
        look = self._phone_run.look(self._output_size)
        self._output_size += len(look.out)
        *lines, self._part = (self._part + look.out).split(b"\n")
        newest: TrainerMessage | None = None
        for line in lines:
            message = TrainerMessage.model_validate_json(line)
            newest = message if message.progress is not None else newest
            self._last = message if message.progress is None else self._last
            if message.spent is not None and self._attachment is not None:
                self._usage = self._attachment.before.plus(message.spent)
        if newest is not None and newest.progress is not None:
            self.progress = newest.progress
            self._report(newest.progress)
        return look

    def _ended(self, look: RemoteRunState) -> TrainerMessage | None:
        """Returns the final message of a runner that exited; None if the run must be restarted."""
        last = self._last
        if last is not None and not last.stopped:
            if last.error is None:
                return last
            self._collect(look)
            self._phone_run.clear_output()
            if last.error.code == DoesNotFit.code:
                raise DoesNotFit(last.error.detail)
            return last
        if last is None and look.status not in (None, KILLED):
            error_output = self._phone_run.error_output()
            self._phone_run.clear_output()
            ended = f"the runner on the phone ended with status {look.status}"
            raise RuntimeFailed(f"{ended}: {error_output}", public=ended)
        # Killed: by the phone for want of memory, with adbd, or by a restart of the phone. It may go on, unless it
        # comes to nothing each time.
        if last is None and self._started_size is not None and look.ledger_size <= self._started_size:
            raise DoesNotFit("the runner on the phone was killed before its first step, most likely for want of memory")
        return None

    def _start(self, look: RemoteRunState) -> None:
        """Pushes missing files to the phone and starts a runner."""
        files = self._plan.manifest
        runner = self._phone.install_runner(self._runner)
        program = self._phone.keep(self._plan.program, files.file("program").sha256)
        weights = self._phone.keep(self._plan.weights, files.file("weights").sha256)
        self._phone.match(self._run.native_plan, f"{self._phone_run.directory}/plan.bin")
        self._push_limits()
        self._attach()
        self._forget()
        self._phone_run.start(runner, program, weights)
        self._started_size = look.ledger_size

    def _attach(self) -> None:
        """Records where the run is."""
        self._attachment = RemoteRunRecord(serial=self._phone.adb.device(), before=self._run.figures())
        write_durably(self._record_path, self._attachment.model_dump_json().encode())

    def _forget(self) -> None:
        """Discards output read so far, which belongs to another runner or is read again."""
        self._output_size, self._part, self._last, self._usage = 0, b"", None, None

    def _agree(self) -> None:
        """Synchronizes both trajectories: the one with more steps replaces the other."""
        local_ledger = self._ledger()
        look = self._phone_run.look(0)
        if not local_ledger and not look.ledger_size:
            return
        if local_ledger and look.ledger_size >= len(local_ledger) and self._phone_run.begins_with(local_ledger):
            return
        remote_ledger = self._phone.adb.read(self._phone_run.ledger)
        remote = self._parse(remote_ledger)
        local = self._parse(local_ledger)
        if remote is not None and (local is None or remote.steps > local.steps):
            write_durably(self._run.ledger, remote_ledger[: _complete_length(remote_ledger)])
            return
        if look.alive:
            self._phone_run.stop()
        self._phone_run.clear_output()
        self._phone_run.clear_checkpoints()
        if local_ledger:
            self._phone.put(self._run.ledger, file_sha256(self._run.ledger), self._phone_run.ledger)
        else:
            self._phone.adb.run(f"rm -f {self._phone_run.ledger}")

    def _ledger(self) -> bytes:
        """Returns the complete frames of the local trajectory."""
        data = self._run.ledger.read_bytes() if self._run.ledger.exists() else b""
        complete_length = _complete_length(data)
        if complete_length < len(data):
            os.truncate(self._run.ledger, complete_length)
        return data[:complete_length]

    def _parse(self, ledger: bytes) -> Trajectory | None:
        """Parses a trajectory; None if it belongs to another run or is empty."""
        try:
            trajectory, _ = parse_trajectory(ledger)
        except (Conflict, ValidationError):
            return None
        return trajectory if trajectory is not None and trajectory.header == self._plan.header else None

    def _collect(self, look: RemoteRunState) -> None:
        """Copies new frames of the phone's trajectory."""
        local_ledger = self._ledger()
        if look.ledger_size > len(local_ledger):
            fresh = self._phone.adb.read(self._phone_run.ledger, len(local_ledger))
            complete_length = _complete_length(local_ledger + fresh)
            with self._run.ledger.open("ab") as file:
                file.write(fresh[: complete_length - len(local_ledger)])
                file.flush()
                os.fsync(file.fileno())
        if self._usage is not None:
            self._run.record_usage(self._usage)
        self._collected_at = time.monotonic()

    def _push_limits(self) -> None:
        """Pushes the run's limits if they have changed."""
        path = self._run.path / "limits"
        limits = path.read_bytes() if path.exists() else b""
        if limits == self._limits:
            return
        remote_path = f"{self._phone_run.directory}/limits"
        if limits:
            self._phone.match(path, remote_path)
        else:
            self._phone.adb.run(f"rm -f {remote_path}")
        self._limits = limits

    def _read_record(self) -> RemoteRunRecord | None:
        try:
            return RemoteRunRecord.model_validate_json(self._record_path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None


def _complete_length(ledger: bytes) -> int:
    return parse_trajectory(ledger)[1]
