"""A device that fails one job after another is given none for a while. Knows no database."""

from __future__ import annotations

from datetime import datetime, timedelta

from server.clock import utc_now
from server.devices.models import Device

REST_AFTER = 3  # failures in a row
FIRST_REST, LONGEST_REST = timedelta(minutes=1), timedelta(hours=1)


def count_failure(device: Device, now: datetime) -> None:
    """A job failed on a device, or its lease ran out; from the third in a row on it rests, each time twice as long."""
    device.failures += 1
    if device.failures >= REST_AFTER:
        device.rests_until = now + min(FIRST_REST * 2 ** min(device.failures - REST_AFTER, 10), LONGEST_REST)


def forget_failure(device: Device) -> None:
    """The job that was counted last is in its hands again: it had only been away."""
    device.failures = max(device.failures - 1, 0)
    device.rests_until = None


def forget_failures(device: Device) -> None:
    """A device has finished a job."""
    device.failures, device.rests_until = 0, None


def resting(until: datetime | None) -> bool:
    """Whether a device is to get no new job now."""
    return until is not None and until > utc_now()
