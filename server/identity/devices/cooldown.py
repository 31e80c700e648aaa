"""The cooldown of devices that fail several jobs in a row."""

from __future__ import annotations

from datetime import datetime, timedelta

from server.clock import utc_now
from server.identity.devices.models import Device

FAILURES_BEFORE_COOLDOWN = 3  # in a row
FIRST_COOLDOWN, LONGEST_COOLDOWN = timedelta(minutes=1), timedelta(hours=1)


def count_failure(device: Device, now: datetime) -> None:
    """Counts a failed job or an expired lease. From the third in a row on, the cooldown doubles."""
    device.failures += 1
    if device.failures >= FAILURES_BEFORE_COOLDOWN:
        doublings = min(device.failures - FAILURES_BEFORE_COOLDOWN, 10)
        device.cooldown_until = now + min(FIRST_COOLDOWN * 2**doublings, LONGEST_COOLDOWN)


def forget_failure(device: Device) -> None:
    """Takes back the last failure: the device resumed the job whose lease had expired."""
    device.failures = max(device.failures - 1, 0)
    device.cooldown_until = None


def forget_failures(device: Device) -> None:
    """Ends the cooldown after a finished job."""
    device.failures, device.cooldown_until = 0, None


def is_cooling_down(until: datetime | None) -> bool:
    """Whether a device gets no new job now."""
    return until is not None and until > utc_now()
