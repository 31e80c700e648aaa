"""Reads a phone's sensors from Android's services over a shell.

Every parser is a function of a service's output and returns None for missing values.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from device_agent.policy.sensors import READING_NAMES, Readings, hottest, local_now
from shared.rules import Rules

MARK = "--mobizo "
# Commands that always run, and commands with long output that run only for a rule; grep keeps the lines in use.
ALWAYS = {
    "battery": "dumpsys battery",
    "thermal": "dumpsys thermalservice",
    "memory": "cat /proc/meminfo",
}
IDLE = {"power": "dumpsys power | grep -E 'mWakefulness=|mStayOn=|astUserActivityTime=|mLastSleepTime='"}

# Android's temperature types that are not temperatures: battery voltage, current and percentage.
OTHER_TYPES = (6, 7, 8)
_TEMPERATURE = re.compile(r"Temperature\{mValue=([-\d.]+), mType=(-?\d+), mName=([^,}]+)")
_AGE = r"=\d+ \((?:(\d+) ms ago|in \d+ ms|now)\)"
_ACTIVITY = re.compile(r"^\s*m?lastUserActivityTime" + _AGE, re.MULTILINE | re.IGNORECASE)
_SLEEP = re.compile(r"^\s*mLastSleepTime" + _AGE, re.MULTILINE)


class AdbSensors:
    """The sensors of one phone; clock and network are the host's (`PhoneWithHost`).

    A reading that the phone had before and lacks now is lost, as while Android starts again.
    """

    def __init__(self, shell: Callable[[str], str]) -> None:
        """shell: runs a command line on the phone and returns its standard output."""
        self._shell = shell
        self._had: set[str] = set()  # names of readings

    def read(self, rules: Rules | None = None) -> Readings:
        """Returns current readings with one shell call. rules: skips long outputs that these rules do not need."""
        commands = dict(ALWAYS)
        if rules is None or rules.idle:
            commands |= IDLE
        # `true` sets the exit status, so that a missing command does not fail the whole line.
        line = "; ".join(f"echo '{MARK}{name}'; {command} 2>/dev/null" for name, command in commands.items())
        outputs = sections(self._shell(f"{line}; true"))
        charging, percent, battery_temperature = parse_battery(outputs.get("battery", ""))
        temperatures = parse_thermal(outputs.get("thermal", ""))
        if battery_temperature is not None:
            temperatures.setdefault("battery", battery_temperature)
        temperature, sensor = hottest(temperatures)
        readings = Readings(
            at=local_now(),
            charging=charging,
            battery_percent=percent,
            temperature=temperature,
            temperature_sensor=sensor,
            available_bytes=parse_memory(outputs.get("memory", "")),
            idle_seconds=parse_power(outputs.get("power", "")),
        )
        self._had |= {name for name in READING_NAMES if getattr(readings, name) is not None}
        # A reading that was skipped also counts as lost; no rule needs it.
        lost = [name for name in READING_NAMES if name in self._had and getattr(readings, name) is None]
        return readings.model_copy(update={"lost": tuple(lost)})


def sections(text: str) -> dict[str, str]:
    """Splits the output into each command's output by name."""
    outputs: dict[str, str] = {}
    for part in text.split(MARK)[1:]:
        name, _, answer = part.partition("\n")
        outputs[name.strip()] = answer
    return outputs


def parse_battery(text: str) -> tuple[bool | None, float | None, float | None]:
    """Parses `dumpsys battery`: external power, percent, and degrees Celsius (given in tenths)."""
    lines = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    outputs = {key.strip(): value.strip() for key, value in lines}
    sources = [value for key, value in outputs.items() if key.endswith(" powered")]
    charging = "true" in sources if sources else None
    if outputs.get("present") == "false":
        return charging, None, None
    level, scale, tenths = (_integer(outputs.get(key)) for key in ("level", "scale", "temperature"))
    percent = 100 * level / scale if level is not None and scale else None
    if percent is not None and not 0 <= percent <= 100:
        percent = None
    return charging, percent, None if tenths is None else tenths / 10


def parse_thermal(text: str) -> dict[str, float]:
    """Parses `dumpsys thermalservice`: degrees Celsius by sensor.

    Prefers the hardware's current values; values cached by the service may be old.
    """
    current = text.partition("Current temperatures from HAL:")[2].partition(" from HAL:")[0]
    cached = text.partition("Cached temperatures:")[2].partition("HAL Ready:")[0]
    return _temperatures(current) or _temperatures(cached)


def _temperatures(text: str) -> dict[str, float]:
    temperatures: dict[str, float] = {}
    for value, kind, name in _TEMPERATURE.findall(text):
        try:
            degrees = float(value)
        except ValueError:
            continue
        if int(kind) not in OTHER_TYPES:
            temperatures[name] = max(degrees, temperatures.get(name, degrees))
    return temperatures


def parse_power(text: str) -> float | None:
    """Parses `dumpsys power`: seconds since a person last used the phone.

    A lit screen counts as use (for example a film) unless a developer setting keeps it on. Android's clock stops in
    deep sleep, so the result may be too small but never too large.
    """
    wakefulness = re.search(r"^\s*mWakefulness=([A-Za-z]+)", text, re.MULTILINE)
    if wakefulness is None:
        return None
    if wakefulness[1] == "Awake" and "mStayOn=true" not in text:
        return 0.0
    ages = _ACTIVITY.findall(text) or _SLEEP.findall(text)
    return min(int(age or 0) for age in ages) / 1000 if ages else None


def parse_memory(text: str) -> int | None:
    """Parses `/proc/meminfo`: bytes that can be allocated without swapping."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return None if match is None else int(match[1]) * 1024


def _integer(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None
