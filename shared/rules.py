"""Rules about when a device may train. The rules of the job and of the device's owner apply together.

`device_agent.policy.rules` evaluates them against sensor readings.
"""

from __future__ import annotations

from datetime import time
from typing import TypeVar

from pydantic import Field, model_validator

from shared.strict_model import StrictModel

Number = TypeVar("Number", int, float)


class QuietHours(StrictModel):
    """A daily interval of the device's local time. It may cross midnight."""

    start: time
    end: time

    @model_validator(mode="after")
    def _check_hours(self) -> QuietHours:
        if self.start.tzinfo is not None or self.end.tzinfo is not None:
            raise ValueError("hours are the device's local time: write 22:00, without a zone")
        if self.start == self.end:
            raise ValueError("start and end are the same moment, which allows nothing; leave hours out for any time")
        return self

    def contains(self, now: time) -> bool:
        """Whether `now` lies in [start, end)."""
        if self.start <= self.end:
            return self.start <= now < self.end
        return now >= self.start or now < self.end


class Rules(StrictModel):
    """Rules about when training is allowed.

    An omitted field has no effect, and so has a rule without a matching sensor.
    """

    charging: bool = Field(False, description="only on external power")
    battery_floor: float | None = Field(None, ge=0, le=100, description="percent; below it only on external power")
    temperature_ceiling: float | None = Field(None, gt=0, le=150, description="degrees Celsius of the hottest sensor")
    memory_floor_bytes: int | None = Field(None, ge=0, description="memory that must stay free beside the training")
    idle: bool = Field(False, description="only while the device is not in use")
    hours: tuple[QuietHours, ...] = Field((), max_length=24, description="only within each of these; none: any time")
    metered: bool = Field(True, description="whether downloads and uploads may use a metered network")
    daily_minutes: float | None = Field(None, ge=0, le=1440, description="of training in a local day, over all jobs")

    def strictest(self, other: Rules) -> Rules:
        """Returns the rules that are in force when both sets of rules apply."""
        return Rules(
            charging=self.charging or other.charging,
            battery_floor=_highest(self.battery_floor, other.battery_floor),
            temperature_ceiling=_lowest(self.temperature_ceiling, other.temperature_ceiling),
            memory_floor_bytes=_highest(self.memory_floor_bytes, other.memory_floor_bytes),
            idle=self.idle or other.idle,
            hours=self.hours + tuple(interval for interval in other.hours if interval not in self.hours),
            metered=self.metered and other.metered,
            daily_minutes=_lowest(self.daily_minutes, other.daily_minutes),
        )


def _highest(first: Number | None, second: Number | None) -> Number | None:
    values = [value for value in (first, second) if value is not None]
    return max(values) if values else None


def _lowest(first: Number | None, second: Number | None) -> Number | None:
    values = [value for value in (first, second) if value is not None]
    return min(values) if values else None
