"""What a device's sensors say at one moment, and the port that reads them. Knows no sensor and no rule.

device_agent.sensors_linux   this machine: a PC, a server, a Jetson
device_agent.sensors_adb     a phone behind adb
"""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from shared.errors import Unavailable
from shared.rules import Rules

COLDEST, HOTTEST = -40.0, 150.0  # degrees Celsius; a sensor that says more or less is broken or a placeholder


class Readings(BaseModel):
    """One look at a device; None where nothing on it can tell."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: AwareDatetime = Field(description="the device's local time, with its zone")
    charging: bool | None = Field(None, description="on external power, whether or not the battery fills")
    battery_percent: float | None = Field(None, ge=0, le=100)
    temperature: float | None = Field(None, ge=COLDEST, le=HOTTEST, description="degrees Celsius of the hottest sensor")
    temperature_sensor: str | None = Field(None, description="the name of that sensor")
    throttled: bool | None = Field(None, description="the system itself slows its processors down for heat")
    available_bytes: int | None = Field(None, ge=0, description="memory that could be given without swapping")
    idle_seconds: float | None = Field(None, ge=0, description="since a person last used the device")
    load: float | None = Field(None, ge=0, le=1, description="share of all processors that other programs use")
    metered: bool | None = Field(None, description="the network in use is paid for by volume")


class Sensors(Protocol):
    """Whatever can look at a device."""

    def read(self, rules: Rules | None = None) -> Readings:
        """One look. rules: leaves out what costs a process to find out and these rules do not ask; None: everything."""


class PhoneBehind:
    """A phone that trains behind a machine that downloads: the phone's readings, the machine's network and clock."""

    def __init__(self, phone: Sensors, machine: Sensors) -> None:
        self._phone, self._machine = phone, machine

    def read(self, rules: Rules | None = None) -> Readings:
        """One look at both; a phone that is away tells nothing, and its rules are held again when it is back."""
        here = self._machine.read(rules)
        try:
            there = self._phone.read(rules)
        except Unavailable:
            return Readings(at=here.at, metered=here.metered)
        return there.model_copy(update={"at": here.at, "metered": here.metered})


def hottest(temperatures: dict[str, float]) -> tuple[float | None, str | None]:
    """The highest plausible temperature (degrees Celsius) and its sensor's name; (None, None) if there is none.

    Exactly 0 is what a sensor without a part behind it says.
    """
    plausible = {name: value for name, value in temperatures.items() if COLDEST < value < HOTTEST and value != 0}
    if not plausible:
        return None, None
    name = max(plausible, key=plausible.__getitem__)
    return plausible[name], name


def local_now() -> datetime:
    """This machine's local time, with its zone."""
    return datetime.now().astimezone()
