"""What devices say to the queue: that they ask for a job, and how training under a lease goes on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from server.identity.devices.repository import SpentNonce
from server.jobs.leases.repository import Ending, JobLease
from shared.job import JobError, Progress
from shared.protocol import ChosenStart, LeaseRequest


@dataclass(frozen=True)
class JobPoll:
    """A device's request for a job."""

    tenant: str
    device_id: str
    request: LeaseRequest


class Parting(StrEnum):
    """A device stops training under a lease."""

    LEAVE = "leave"  # and returns within seconds, or loses the job
    RELEASE = "release"  # and gives the job back


Report = Progress | ChosenStart | JobError | Parting


@dataclass(frozen=True)
class Message:
    """A message of a device about its lease. nonce: the nonce of its signature, if it is signed.

    says: a heartbeat's progress, the start that it chose, an error that ends the job, or a parting.
    """

    device_id: str
    lease_id: str
    says: Report
    nonce: SpentNonce | None = None


def changes_nothing(message: Message, lease: JobLease) -> bool:
    """Whether a message repeats what ended its lease, or is about a job that was cancelled."""
    failed = lease.ending is Ending.FAILED and isinstance(message.says, JobError)
    released = lease.ending is Ending.RELEASED and message.says is Parting.RELEASE
    return failed or released or lease.ending is Ending.CANCELLED
