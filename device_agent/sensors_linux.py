"""This machine's sensors, as the kernel and systemd show them: a PC, a server, a Jetson. Knows no rule's threshold.

power         /sys/class/power_supply
heat          /sys/class/thermal zones and the processors' chips in /sys/class/hwmon
throttling    /sys/class/thermal cooling devices, /sys/devices/system/cpu/*/thermal_throttle
memory, load  psutil
idle          logind; without it, when the terminals of psutil's users were last read
metered       NetworkManager over D-Bus
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # the package ships no types

from device_agent.memory import spare_bytes
from device_agent.sensors import Readings, hottest, local_now
from device_agent.sensors_logind import SESSION_PROPERTIES, idle_seconds, session_ids
from shared.rules import Rules

Ask = Callable[[Sequence[str]], str | None]

ASK_SECONDS = 3.0
LOAD_SECONDS = 0.5  # the shortest time that a load is measured over
PLACEHOLDER_ZONES = ("PMIC-Die", "thermal-fan-est")  # Jetson's: a constant 100 degrees, and a mixture for the fan
PROCESSOR_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "amdgpu")
POWER_LINES = ("Mains", "USB", "Wireless")
BATTERIES = ("Battery", "UPS")
NO_AUTO_START = ("busctl", "--system", "--auto-start=no", f"--timeout={ASK_SECONDS:g}")
METERED = (
    *NO_AUTO_START,
    "get-property",
    "org.freedesktop.NetworkManager",
    "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager",
    "Metered",
)


def ask(command: Sequence[str]) -> str | None:
    """What a program prints; None if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


class LinuxSensors:
    """The machine under `root`. Load and Intel's throttling come of two looks, so the first one does not tell them."""

    def __init__(self, root: Path = Path("/"), ask: Ask = ask) -> None:
        """ask: runs a program of this machine for its output."""
        self._root, self._ask = root, ask
        self._load = OtherLoad()
        self._throttles: int | None = None

    def read(self, rules: Rules | None = None) -> Readings:
        """One look. rules: leaves out what costs a process to find out and these rules do not ask; None: everything."""
        charging, percent = power(self._root)
        temperature, sensor = hottest(temperatures(self._root))
        return Readings(
            at=local_now(),
            charging=charging,
            battery_percent=percent,
            temperature=temperature,
            temperature_sensor=sensor,
            throttled=self._throttled(),
            available_bytes=spare_bytes(),
            idle_seconds=self._idle() if rules is None or rules.idle else None,
            load=self._load.share() if rules is None or rules.idle else None,
            metered=metered(self._ask(METERED)) if rules is None or not rules.metered else None,
        )

    def _throttled(self) -> bool | None:
        count = throttle_count(self._root)
        grown = None if count is None or self._throttles is None else count > self._throttles
        self._throttles = count
        capped = processors_capped(self._root)
        return True if capped or grown else capped if capped is not None else grown

    def _idle(self) -> float | None:
        listed = self._ask(("loginctl", "list-sessions", "--no-legend", "--no-pager"))
        if listed is not None:
            sessions = session_ids(listed)
            wanted = ("--property=" + ",".join(SESSION_PROPERTIES), *sessions)
            shown = self._ask(("loginctl", "show-session", "--no-pager", *wanted)) if sessions else ""
            if shown is not None:
                return idle_seconds(shown, time.time(), psutil.boot_time())
        reads = [_read_at(self._root / "dev" / user.terminal) for user in psutil.users() if user.terminal]
        ago = [time.time() - at for at in reads if at is not None]
        return max(min(ago), 0.0) if ago else None


class OtherLoad:
    """The share of all processors that programs other than this one and its children used since the last look."""

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None  # processor seconds: all, busy, ours
        self._share: float | None = None

    def share(self) -> float | None:
        """0 to 1; None at the first look. A look soon after another gives the same answer."""
        spent = psutil.cpu_times()._asdict()
        # The kernel counts a guest's time as its host's user time too.
        total = sum(spent.values()) - spent.get("guest", 0) - spent.get("guest_nice", 0)
        busy = total - spent["idle"] - spent.get("iowait", 0)
        now = (total, busy, own_seconds())
        if self._last is None:
            self._last = now
        elif total - self._last[0] >= LOAD_SECONDS * psutil.cpu_count():
            all_spent, all_busy, ours = (new - old for new, old in zip(now, self._last, strict=True))
            self._share = min(max((all_busy - ours) / all_spent, 0.0), 1.0)
            self._last = now
        return self._share


def own_seconds() -> float:
    """Processor seconds of this process and its children, those that ended among them."""
    me = psutil.Process()
    seconds = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it ended in between; its time is its parent's from now on
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def power(root: Path) -> tuple[bool | None, float | None]:
    """Whether the machine is on external power, and its batteries' charge in percent (their mean)."""
    online, statuses, charges = [], [], []
    for supply in sorted((root / "sys/class/power_supply").glob("*")):
        if _text(supply / "scope") == "Device":
            continue  # a mouse's or a keyboard's own battery
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
    # A battery that is full, or kept at its limit, is so on external power only.
    return True if "Full" in statuses or "Not charging" in statuses else None, percent


def temperatures(root: Path) -> dict[str, float]:
    """Degrees Celsius by sensor, as they are: with the absurd ones of broken or absent parts."""
    found: dict[str, float] = {}
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        name, value = _text(zone / "type"), _number(zone / "temp")
        if name and value is not None and name not in PLACEHOLDER_ZONES:
            found[name] = max(value / 1000, found.get(name, value / 1000))
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        name = _text(chip / "name")
        if name in PROCESSOR_CHIPS:
            for file in sorted(chip.glob("temp*_input")):
                value = _number(file)
                label = _text(file.with_name(file.name.replace("_input", "_label"))) or file.name.split("_")[0]
                if value is not None:
                    found[f"{name} {label}"] = value / 1000
    return found


def processors_capped(root: Path) -> bool | None:
    """Whether the kernel (or Jetson's firmware) holds processors back for heat now; None if it does not tell.

    Fans are cooling devices too, and so is a GPU's clock on some Jetsons, where it tells of no heat: neither counts.
    """
    states = []
    for device in (root / "sys/class/thermal").glob("cooling_device*"):
        kind, state = _text(device / "type") or "", _number(device / "cur_state")
        if state is not None and (kind.endswith("-alert") or kind == "Processor" or "cpufreq" in kind):
            states.append(state)
    return any(state > 0 for state in states) if states else None


def throttle_count(root: Path) -> int | None:
    """How often the processors have throttled themselves since boot; None where they do not count."""
    counts = [_number(file) for file in root.glob("sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count")]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def metered(answer: str | None) -> bool | None:
    """NetworkManager's word on the network in use, such as "u 4": 1 yes, 2 no, 3 and 4 its guesses of the same."""
    return {"u 1": True, "u 2": False, "u 3": True, "u 4": False}.get((answer or "").strip())


def _text(path: Path) -> str | None:
    """A small file's text; None if it is not there or its driver cannot answer (a part without power gives EAGAIN)."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    try:
        return int(_text(path) or "")
    except ValueError:
        return None


def _read_at(path: Path) -> float | None:
    try:
        return path.stat().st_atime
    except OSError:
        return None
