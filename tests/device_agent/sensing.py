"""Sensors whose readings a test sets, in place of a device's own."""

from datetime import UTC, datetime

from device_agent.policy.sensors import Readings

NOON = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)
FINE = Readings(
    at=NOON,
    charging=True,
    battery_percent=80,
    temperature=40,
    temperature_sensor="cpu",
    available_bytes=8 << 30,
    idle_seconds=1e5,
    load=0,
    metered=False,
)
BATTERY = FINE.model_copy(update={"charging": False})
METERED = FINE.model_copy(update={"metered": True})


def degrees(temperature):
    return FINE.model_copy(update={"temperature": temperature})


class SettableSensors:
    """Returns the readings `now`, which a test may change at any time."""

    def __init__(self, now=FINE):
        self.now = now

    def read(self, rules=None):
        return self.now
