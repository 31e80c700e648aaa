"""A device's sensor readings, and the sensors of a Linux machine (PC, server, Jetson). `phone_sensors.py` reads a
phone's.

power         /sys/class/power_supply
temperature   /sys/class/thermal zones and the processors' chips in /sys/class/hwmon
memory, load  psutil
idle          logind; without it, when the terminals of psutil's users were last read
metered       NetworkManager over D-Bus
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol, get_args

import psutil
from pydantic import AwareDatetime, Field

from device_agent.memory import spare_bytes
from shared.errors import Unavailable
from shared.rules import Rules
from shared.strict_model import StrictModel

Ask = Callable[[Sequence[str]], str | None]

COLDEST, HOTTEST = -40.0, 150.0  # degrees Celsius; values outside are of a broken sensor or a placeholder
ASK_SECONDS = 3.0
LOAD_SECONDS = 0.5  # minimum duration of a load measurement
PLACEHOLDER_ZONES = ("PMIC-Die", "thermal-fan-est")  # of a Jetson: a constant 100 °C, and an average for the fan
PROCESSOR_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "amdgpu")
POWER_LINES = ("Mains", "USB", "Wireless")
BATTERIES = ("Battery", "UPS")
BUSCTL = ("busctl", "--system", "--auto-start=no", f"--timeout={ASK_SECONDS:g}")
METERED = (
    *BUSCTL,
    "get-property",
    "org.freedesktop.NetworkManager",
    "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager",
    "Metered",
)
SESSION_PROPERTIES = ("Type", "Class", "State", "IdleHint", "IdleSinceHint")
GRAPHICAL = ("x11", "wayland", "mir")


# The readings that rules compare and that a phone's sensors give.
ReadingName = Literal["charging", "battery_percent", "temperature", "available_bytes", "idle_seconds"]
READING_NAMES: tuple[ReadingName, ...] = get_args(ReadingName)


class Readings(StrictModel):
    """One set of sensor readings; None where the device has no sensor, or where the sensor is lost."""

    at: AwareDatetime = Field(description="the device's local time, with its zone")
    charging: bool | None = Field(None, description="on external power, whether or not the battery is charging")
    battery_percent: float | None = Field(None, ge=0, le=100)
    temperature: float | None = Field(None, ge=COLDEST, le=HOTTEST, description="degrees Celsius of the hottest sensor")
    temperature_sensor: str | None = Field(None, description="the name of that sensor")
    available_bytes: int | None = Field(None, ge=0, description="memory available without swapping")
    idle_seconds: float | None = Field(None, ge=0, description="since a person last used the device")
    load: float | None = Field(None, ge=0, le=1, description="share of all processors that other programs use")
    metered: bool | None = Field(None, description="the network is charged by volume")
    lost: tuple[ReadingName, ...] = Field((), description="readings that cannot be taken now, from sensors that exist")


class Sensors(Protocol):
    """Reads a device's sensors."""

    def read(self, rules: Rules | None = None) -> Readings:
        """Returns current readings. rules: skips slow sensors that these rules do not need; None reads everything."""


class PhoneWithHost:
    """A phone behind a host that downloads: the phone's sensors, but the host's network and clock."""

    def __init__(self, phone: Sensors, host: Sensors) -> None:
        self._phone, self._host = phone, host

    def read(self, rules: Rules | None = None) -> Readings:
        """Returns both readings combined. If the phone is unreachable, all of its readings are lost."""
        host = self._host.read(rules)
        try:
            phone = self._phone.read(rules)
        except Unavailable:
            return Readings(at=host.at, metered=host.metered, lost=READING_NAMES)
        return phone.model_copy(update={"at": host.at, "metered": host.metered})


def hottest(temperatures: dict[str, float]) -> tuple[float | None, str | None]:
    """Returns the highest plausible temperature (degrees Celsius) and its sensor's name, or (None, None).

    A reading of exactly 0 comes from a sensor that is not connected.
    """
    plausible = {name: value for name, value in temperatures.items() if COLDEST < value < HOTTEST and value != 0}
    if not plausible:
        return None, None
    name = max(plausible, key=plausible.__getitem__)
    return plausible[name], name


def local_now() -> datetime:
    """Returns the local time with its zone."""
    return datetime.now().astimezone()


def ask(command: Sequence[str]) -> str | None:
    """Returns a program's output; None if it is missing, fails or exceeds ASK_SECONDS."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return result.stdout


class LinuxSensors:
    """The sensors of the machine at `root`. The load compares two readings, so the first one lacks it."""

    def __init__(self, root: Path = Path("/"), ask: Ask = ask) -> None:
        """ask: runs a program and returns its output."""
        self._root, self._ask = root, ask
        self._load = OtherProgramsLoad()

    def read(self, rules: Rules | None = None) -> Readings:
        """Returns current readings; see `Sensors.read`."""
        charging, percent = power(self._root)
        temperature, sensor = hottest(temperatures(self._root))
        return Readings(
            at=local_now(),
            charging=charging,
            battery_percent=percent,
            temperature=temperature,
            temperature_sensor=sensor,
            available_bytes=spare_bytes(),
            idle_seconds=self._idle() if rules is None or rules.idle else None,
            load=self._load.share() if rules is None or rules.idle else None,
            metered=metered(self._ask(METERED)) if rules is None or not rules.metered else None,
        )

    def _idle(self) -> float | None:
        listing = self._ask(("loginctl", "list-sessions", "--no-legend", "--no-pager"))
        if listing is not None:
            sessions = session_ids(listing)
            arguments = ("--property=" + ",".join(SESSION_PROPERTIES), *sessions)
            properties = self._ask(("loginctl", "show-session", "--no-pager", *arguments)) if sessions else ""
            if properties is not None:
                return idle_seconds(properties, time.time(), psutil.boot_time())
        terminals = [self._root / "dev" / user.terminal for user in psutil.users() if user.terminal]
        ago = []
        for terminal in terminals:
            with suppress(OSError):
                ago.append(time.time() - terminal.stat().st_atime)
        return max(min(ago), 0.0) if ago else None


class OtherProgramsLoad:
    """The share of all processors used by other programs than this process and its children."""

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None  # processor seconds: all, busy, ours
        self._share: float | None = None

    def share(self) -> float | None:
        """Returns 0 to 1; None at the first call. Calls in short succession return the same value."""
        cpu_times = psutil.cpu_times()._asdict()
        # The kernel counts a guest's time as its host's user time too.
        total = sum(cpu_times.values()) - cpu_times.get("guest", 0) - cpu_times.get("guest_nice", 0)
        busy = total - cpu_times["idle"] - cpu_times.get("iowait", 0)
        now = (total, busy, own_seconds())
        if self._last is None:
            self._last = now
        elif total - self._last[0] >= LOAD_SECONDS * psutil.cpu_count():
            all_spent, all_busy, own_busy = (new - old for new, old in zip(now, self._last, strict=True))
            self._share = min(max((all_busy - own_busy) / all_spent, 0.0), 1.0)
            self._last = now
        return self._share


def own_seconds() -> float:
    """Returns the processor seconds of this process and its children, including terminated ones."""
    me = psutil.Process()
    seconds = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it has ended; its time now counts for its parent
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def power(root: Path) -> tuple[bool | None, float | None]:
    """Returns whether the machine is on external power, and the mean charge of its batteries in percent."""
    online, statuses, charges = [], [], []
    for supply in sorted((root / "sys/class/power_supply").glob("*")):
        if _text(supply / "scope") == "Device":
            continue  # the battery of a mouse or a keyboard
        kind = _text(supply / "type")
        if kind in POWER_LINES:
            online.append(_text(supply / "online"))
        elif kind in BATTERIES and _text(supply / "present") != "0":
            statuses.append(_text(supply / "status"))
            charge = _number(supply / "capacity")
            if charge is not None:
                charges.append(min(max(charge, 0), 100))
    percent = sum(charges) / len(charges) if charges else None
    if any(line not in (None, "0") for line in online) or "Charging" in statuses:
        return True, percent
    if "Discharging" in statuses or "0" in online:
        return False, percent
    # A battery is full, or held at its limit, only on external power.
    return True if "Full" in statuses or "Not charging" in statuses else None, percent


def temperatures(root: Path) -> dict[str, float]:
    """Returns the unfiltered temperatures in degrees Celsius by sensor name."""
    readings: dict[str, float] = {}
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        name, value = _text(zone / "type"), _number(zone / "temp")
        if name and value is not None and name not in PLACEHOLDER_ZONES:
            readings[name] = max(value / 1000, readings.get(name, value / 1000))
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        name = _text(chip / "name")
        if name in PROCESSOR_CHIPS:
            for file in sorted(chip.glob("temp*_input")):
                value = _number(file)
                label = _text(file.with_name(file.name.replace("_input", "_label"))) or file.name.split("_")[0]
                if value is not None:
                    readings[f"{name} {label}"] = value / 1000
    return readings


def metered(answer: str | None) -> bool | None:
    """Parses NetworkManager's answer such as "u 4": 1 yes, 2 no, 3 probably yes, 4 probably no."""
    return {"u 1": True, "u 2": False, "u 3": True, "u 4": False}.get((answer or "").strip())


def _text(path: Path) -> str | None:
    """Returns a small file's text; None if it is missing or its driver returns an error (EAGAIN without power)."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    try:
        return int(_text(path) or "")
    except ValueError:
        return None


def session_ids(listing: str) -> list[str]:
    """Returns the session ids in the output of `loginctl list-sessions --no-legend`."""
    return [line.split()[0] for line in listing.splitlines() if line.split()]


def idle_seconds(properties: str, now: float, boot: float) -> float:
    """Returns the seconds since a person last used any session in the output of `loginctl show-session`.

    now, boot: seconds since 1970. A terminal reports when it was last read. A desktop reports its idle time only once
    it is idle; until then it is in use. Without sessions, counts from boot.
    """
    blocks = (block.splitlines() for block in properties.split("\n\n"))
    sessions = (dict(line.split("=", 1) for line in lines if "=" in line) for lines in blocks)
    last = [used for used in (_last_used(session, now) for session in sessions) if used is not None]
    return max(now - max(last, default=boot), 0.0)


def _last_used(session: dict[str, str], now: float) -> float | None:
    """Returns seconds since 1970; None for a session without a person, such as a login screen or a service."""
    if not session.get("Class", "").startswith("user") or session.get("State") == "closing":
        return None
    graphical = session.get("Type") in GRAPHICAL
    if not graphical and session.get("Type") != "tty":
        return None
    idle_since = session.get("IdleSinceHint", "0")
    if (graphical and session.get("IdleHint") != "yes") or not idle_since.isdecimal() or idle_since == "0":
        return now
    return int(idle_since) / 1e6
