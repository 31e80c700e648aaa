"""A phone's sensors, asked over adb of Android's own services. Knows no adb: whoever calls gives it the phone's shell.

Every parser is a function of a service's text alone, and says None for what that text does not tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

from device_agent.sensors import Readings, hottest, local_now
from shared.rules import Rules

MARK = "--mobizo "
# What is asked always, and what is long and asked only for a rule; grep keeps the lines that the parsers read.
ALWAYS = {
    "time": "date +%Y-%m-%dT%H:%M:%S%z",
    "battery": "dumpsys battery",
    "thermal": "dumpsys thermalservice",
    "memory": "cat /proc/meminfo",
}
IDLE = {"power": "dumpsys power | grep -E 'mWakefulness=|mStayOn=|astUserActivityTime=|mLastSleepTime='"}
METERED = {"network": "dumpsys connectivity | grep -E 'Active default network|NetworkAgentInfo'"}

# Android's Temperature types that measure no heat: battery voltage, current and percentage.
NO_HEAT_TYPES = (6, 7, 8)
_TEMPERATURE = re.compile(r"Temperature\{mValue=([-\d.]+), mType=(-?\d+), mName=([^,}]+)")
_AGO = r"=\d+ \((?:(\d+) ms ago|in \d+ ms|now)\)"
_ACTIVITY = re.compile(r"^\s*m?lastUserActivityTime" + _AGO, re.MULTILINE | re.IGNORECASE)
_SLEEP = re.compile(r"^\s*mLastSleepTime" + _AGO, re.MULTILINE)


class AdbSensors:
    """One phone."""

    def __init__(self, shell: Callable[[str], str]) -> None:
        """shell: runs a line in the phone's shell for its standard output; what it raises is let through."""
        self._shell = shell

    def read(self, rules: Rules | None = None) -> Readings:
        """One look, by one call of the shell. rules: leaves out long answers these do not ask for; None: everything."""
        asked = dict(ALWAYS)
        if rules is None or rules.idle:
            asked |= IDLE
        if rules is None or not rules.metered:
            asked |= METERED
        # The last command decides how the line ends: one that a phone lacks must not fail the others.
        line = "; ".join(f"echo '{MARK}{name}'; {command} 2>/dev/null" for name, command in asked.items())
        said = sections(self._shell(f"{line}; true"))
        charging, percent, battery_heat = parse_battery(said.get("battery", ""))
        heat, throttled = parse_thermal(said.get("thermal", ""))
        if battery_heat is not None:
            heat.setdefault("battery", battery_heat)
        temperature, sensor = hottest(heat)
        return Readings(
            at=parse_time(said.get("time", "")) or local_now(),
            charging=charging,
            battery_percent=percent,
            temperature=temperature,
            temperature_sensor=sensor,
            throttled=throttled,
            available_bytes=parse_memory(said.get("memory", "")),
            idle_seconds=parse_power(said.get("power", "")),
            metered=parse_connectivity(said.get("network", "")),
        )


def sections(text: str) -> dict[str, str]:
    """What each command said, by its name."""
    said: dict[str, str] = {}
    for part in text.split(MARK)[1:]:
        name, _, answer = part.partition("\n")
        said[name.strip()] = answer
    return said


def parse_time(text: str) -> datetime | None:
    """`date`: the phone's local time with its zone."""
    try:
        return datetime.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None


def parse_battery(text: str) -> tuple[bool | None, float | None, float | None]:
    """`dumpsys battery`: external power, percent, and the battery's degrees Celsius (written in tenths)."""
    lines = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    said = {key.strip(): value.strip() for key, value in lines}
    sources = [value for key, value in said.items() if key.endswith(" powered")]
    charging = "true" in sources if sources else None
    if said.get("present") == "false":
        return charging, None, None
    level, scale, tenths = (_integer(said.get(key)) for key in ("level", "scale", "temperature"))
    percent = 100 * level / scale if level is not None and scale else None
    if percent is not None and not 0 <= percent <= 100:
        percent = None
    return charging, percent, None if tenths is None else tenths / 10


def parse_thermal(text: str) -> tuple[dict[str, float], bool | None]:
    """`dumpsys thermalservice`: degrees Celsius by sensor, and whether Android throttles (status 1, light, or above).

    The hardware's own current values where it gives them; those that the service has kept may be old.
    """
    current = text.partition("Current temperatures from HAL:")[2].partition(" from HAL:")[0]
    kept = text.partition("Cached temperatures:")[2].partition("HAL Ready:")[0]
    status = re.search(r"Thermal Status: (\d+)", text)
    heat = _temperatures(current) or _temperatures(kept)
    return heat, None if status is None else int(status[1]) > 0


def _temperatures(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for value, kind, name in _TEMPERATURE.findall(text):
        try:
            degrees = float(value)
        except ValueError:
            continue
        if int(kind) not in NO_HEAT_TYPES:
            found[name] = max(degrees, found.get(name, degrees))
    return found


def parse_power(text: str) -> float | None:
    """`dumpsys power`: seconds since a person last used the phone.

    A lit screen is in use, touched or not (a film), unless a developer setting keeps it lit. Android counts this time
    without deep sleep, so that it may say less than has passed, never more.
    """
    wakefulness = re.search(r"^\s*mWakefulness=([A-Za-z]+)", text, re.MULTILINE)
    if wakefulness is None:
        return None
    if wakefulness[1] == "Awake" and "mStayOn=true" not in text:
        return 0.0
    told = _ACTIVITY.findall(text) or _SLEEP.findall(text)
    return min(int(ago or 0) for ago in told) / 1000 if told else None


def parse_memory(text: str) -> int | None:
    """`/proc/meminfo`: bytes that could be given without swapping."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def parse_connectivity(text: str) -> bool | None:
    """`dumpsys connectivity`: whether the network in use is metered; None without one."""
    active = re.search(r"Active default network: (\d+)", text)
    if active is None:
        return None
    for line in text.splitlines():
        if "NetworkAgentInfo{" in line and re.search(rf"\bnetwork\{{{active[1]}\}}", line):
            capabilities = re.search(r"Capabilities: ([A-Z_&]+)", line)
            if capabilities is not None:
                return not {"NOT_METERED", "TEMPORARILY_NOT_METERED"} & set(capabilities[1].split("&"))
    return None


def _integer(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None
