"""Explains why a job is waiting: for its program, for jobs ahead of it, or for a suitable device.

Examines a bounded number of the user's most recently enrolled devices, by their last reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.identity.devices.repository import BindingRepository, Device, DeviceRepository, is_cooling_down
from server.jobs.leases.repository import LeaseRepository
from server.jobs.repository import Job
from server.jobs.scheduling.matching import DeviceOffer, lacks
from server.jobs.scheduling.repository import Lane, QueueRepository
from shared.job import JobState
from shared.protocol import JobWaiting

MAX_DEVICES = 1000
MAX_AHEAD = 1000
NO_REQUEST = "has not requested a job yet"
_OTHERWISE = {
    JobState.QUEUED: "its program is waiting to be compiled; if it waits for long, `mobizo-server doctor` shows why",
    JobState.COMPILING: "its program is being compiled",
    JobState.TRAINING: "a device is training it",
    JobState.SUCCEEDED: "it has succeeded",
    JobState.FAILED: "it has failed",
    JobState.CANCELLED: "it was cancelled",
}


class ExplanationService:
    """Explanations in one reading transaction."""

    def __init__(self, session: Session) -> None:
        self._queue = QueueRepository(session)
        self._devices = DeviceRepository(session)
        self._bindings = BindingRepository(session)
        self._leases = LeaseRepository(session)

    def explain(self, job: Job) -> JobWaiting:
        """Explains why a job is not progressing."""
        if job.lane_number is None:
            why = _OTHERWISE.get(job.state, f"it is {job.state}")
            if job.state is JobState.TRAINING and job.progress is not None and job.progress.why is not None:
                why = f"{why}: {job.progress.why}"
            return JobWaiting(state=job.state, why=why)
        lane = self._queue.lane_by_number(job.lane_number)
        ahead = self._queue.ahead(job, MAX_AHEAD)
        devices = self._bindings.newest_devices(job.tenant, job.user, MAX_DEVICES)
        if not devices and self._devices.newest(job.tenant, 1):
            why = (
                f"no device is bound to user {job.user!r}; if the user's data is on a device, an operator runs "
                f"`mobizo device bind DEVICE {job.user}`"
            )
            return JobWaiting(state=job.state, why=why, ahead=ahead, devices=0, eligible=0)
        if job.only_device_id is not None:
            devices = [device for device in devices if device.id == job.only_device_id]
        eligible, unsuitable = self._count(lane, devices)
        why = _reason(job, devices, eligible, unsuitable, ahead)
        return JobWaiting(state=job.state, why=why, ahead=ahead, devices=len(devices), eligible=eligible)

    def _count(self, lane: Lane, devices: Sequence[Device]) -> tuple[int, Counter[str]]:
        """Returns how many devices can take the lane's jobs, and counts the others by reason."""
        unsuitable: Counter[str] = Counter()
        holders = self._leases.holders([device.id for device in devices])
        declined = self._leases.who_declined(lane.recipe_id, utc_now())
        users = self._bindings.users_of([device.id for device in devices])
        for device in devices:
            busy, has_declined = device.id in holders, device.id in declined
            if reason := _unsuitable(lane, device, users[device.id], busy, has_declined):
                unsuitable[reason] += 1
        return len(devices) - unsuitable.total(), unsuitable


def _unsuitable(lane: Lane, device: Device, users: Sequence[str], busy: bool, declined: bool) -> str | None:
    """The first reason why a device cannot take the lane's jobs, as a predicate; None if it can. users: bound to it."""
    report = device.report
    if report is None:
        return NO_REQUEST
    if lane.dataset not in report.datasets:
        return f"lacks data set {lane.dataset!r}"
    offer = DeviceOffer.reported(device, report, users)
    if (lack := next(lacks(lane.needs, offer), None)) is not None:
        return f"lacks {lack}"
    if declined:
        return "lacks the memory that the program takes"
    if is_cooling_down(device.cooldown_until):
        return "is cooling down after failures"
    return "is busy" if busy else None


def _reason(job: Job, devices: Sequence[Device], eligible: int, unsuitable: Counter[str], ahead: int) -> str:
    alone = job.only_device_id is not None
    if not devices:
        if alone:
            return (
                "the only device that may train it is not enrolled or not bound; an operator runs "
                f"`mobizo device bind DEVICE {job.user}`"
            )
        return f"no device is enrolled; an operator runs `mobizo device enroll-token --user {job.user}`"
    if eligible:
        wait = f"{eligible} of {len(devices)} devices of the user can take it when they next request a job"
        return f"{wait}; {ahead} jobs are ahead of it" if ahead else wait
    remedy = "; ".join(_remedies(job, unsuitable))
    if alone:
        return f"the only device that may train it {next(iter(unsuitable))}{remedy and '; '}{remedy}"
    reasons = ", ".join(f"{reason} ({count})" for reason, count in unsuitable.most_common())
    return f"none of {len(devices)} devices of the user can take it: {reasons}{remedy and '; '}{remedy}"


def _remedies(job: Job, unsuitable: Counter[str]) -> Iterator[str]:
    """Yields what to do where a device does not become suitable by itself."""
    if f"lacks data set {job.request.dataset!r}" in unsuitable:
        yield f"on a device that has the data, `mobizo-agent data add {job.request.dataset} FILE` adds the data set"
    if NO_REQUEST in unsuitable:
        yield "`mobizo-agent run` on the device requests jobs"
