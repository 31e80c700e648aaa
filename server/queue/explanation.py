"""Why a job waits, in words: for its program, for its turn, or for a device that may take it. Knows no HTTP.

Looks at the devices that enrolled last, a bounded number, as they told of themselves when they last asked for a job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.devices.models import Device
from server.devices.repository import DeviceRepository
from server.devices.rest import resting
from server.jobs.models import Job
from server.leases.repository import LeaseRepository
from server.queue.matching import Asking, lacks
from server.queue.repository import Line, QueueRepository
from shared.job import JobState
from shared.protocol import JobWaiting

MOST_DEVICES = 1000
MOST_AHEAD = 1000
_OTHERWISE = {
    JobState.QUEUED: "its program waits to be compiled",
    JobState.COMPILING: "its program is being compiled",
    JobState.TRAINING: "a device has it",
    JobState.SUCCEEDED: "it has succeeded",
    JobState.FAILED: "it has failed",
    JobState.CANCELLED: "it was cancelled",
}


class ExplanationService:
    """Explanations in one reading transaction."""

    def __init__(self, session: Session) -> None:
        self._queue = QueueRepository(session)
        self._devices = DeviceRepository(session)
        self._leases = LeaseRepository(session)

    def explain(self, job: Job) -> JobWaiting:
        """Why a job does not go on."""
        if job.lane_number is None:
            why = _OTHERWISE.get(job.state, f"it is {job.state}")
            if job.state is JobState.TRAINING and job.progress is not None and job.progress.why is not None:
                why = f"{why}: {job.progress.why}"
            return JobWaiting(state=job.state, why=why)
        line = self._queue.line(job.lane_number)
        ahead = self._queue.ahead(job, MOST_AHEAD)
        devices = self._devices.newest(job.tenant, MOST_DEVICES)
        if job.only_device_id is not None:
            devices = [device for device in devices if device.id == job.only_device_id]
        able, missing = self._count(line, devices)
        why = _words(job, devices, able, missing, ahead)
        return JobWaiting(state=job.state, why=why, ahead=ahead, devices=len(devices), able=able)

    def _count(self, line: Line, devices: Sequence[Device]) -> tuple[int, Counter[str]]:
        """(devices that may take a lane's jobs, and of the others how many lack what)."""
        missing: Counter[str] = Counter()
        holders = self._leases.holders([device.id for device in devices])
        declined = self._leases.who_declined(line.recipe_id, utc_now())
        for device in devices:
            if reason := _first_lack(line, device, device.id in holders, device.id in declined):
                missing[reason] += 1
        return len(devices) - missing.total(), missing


def _first_lack(line: Line, device: Device, busy: bool, declined: bool) -> str | None:
    """The first thing that a device lacks to be given the lane's jobs; None if it has all."""
    told = device.told
    if told is None:
        return "a request for a job so far"
    if line.dataset not in told.datasets:
        return f"data set {line.dataset!r}"
    asking = Asking(
        device.tenant, device.id, frozenset(told.datasets), told.memory_bytes, told.capabilities, device.labels.root
    )
    if (lack := next(lacks(line.needs, asking), None)) is not None:
        return lack
    if declined:
        return "the memory that its program takes"
    if resting(device.rests_until):
        return "a finished job among its last ones, and rests"
    return "its hands free" if busy else None


def _words(job: Job, devices: Sequence[Device], able: int, missing: Counter[str], ahead: int) -> str:
    alone = job.only_device_id is not None
    if not devices:
        return "the only device that may train it is not enrolled" if alone else "no device is enrolled"
    if able:
        wait = f"{able} of {len(devices)} enrolled devices may take it, and it is offered when one asks for a job"
        return f"{wait}; {ahead} jobs go before it" if ahead else wait
    if alone:
        return f"the only device that may train it does not have {next(iter(missing))}"
    if len(missing) == 1:
        return f"no enrolled device has {next(iter(missing))} ({len(devices)} looked at)"
    parts = ", ".join(f"{count} without {lack}" for lack, count in missing.most_common())
    return f"none of {len(devices)} enrolled devices may take it: {parts}"
