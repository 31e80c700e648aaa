"""Sensors: recorded texts and trees, and once this machine."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.android.adb import PhoneUnreachable
from device_agent.policy.phone_sensors import (
    AdbSensors,
    parse_battery,
    parse_memory,
    parse_power,
    parse_thermal,
    sections,
)
from device_agent.policy.sensors import (
    READING_NAMES,
    LinuxSensors,
    PhoneWithHost,
    ask,
    hottest,
    idle_seconds,
    metered,
    own_seconds,
    power,
    session_ids,
)
from shared.rules import Rules

RECORDINGS = Path(__file__).parents[1] / "recordings"
EVERY_RULE = Rules(idle=True, metered=False)


def plant(root, recording):
    """Writes a recorded sysfs under `root`."""
    for line in recording.splitlines():
        name, value = line.split(": ", 1)
        path = root / name
        if value == "!":
            path.mkdir(parents=True)  # reading it fails, as that of a part without power
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(value + "\n")


def linux(tmp_path, recording, answers=None):
    plant(tmp_path, (RECORDINGS / recording).read_text())
    return LinuxSensors(tmp_path, lambda command: (answers or {}).get(" ".join(command[:2])))


@pytest.fixture
def phone(tmp_path):
    """The shell of a recorded phone: a real shell, whose `dumpsys` and /proc/meminfo are recordings."""

    def shell_of(name):
        files = RECORDINGS / name
        services = {"battery": "battery", "thermalservice": "thermal", "power": "power"}
        cases = "\n".join(f"{service}) cat {files / file}.txt ;;" for service, file in services.items())
        programs = {
            "dumpsys": f'case "$1" in\n{cases}\n*) echo "Can\'t find service: $1" >&2; exit 1 ;;\nesac',
            "cat": f'case "$1" in /proc/meminfo) exec /bin/cat {files}/memory.txt;; *) exec /bin/cat "$@";; esac',
        }
        for program, text in programs.items():
            path = tmp_path / program
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        commands = []

        def shell(line):
            commands.append(line)
            environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
            return subprocess.run(
                ["sh", "-c", line], env=environment, check=True, capture_output=True, text=True
            ).stdout

        return shell, commands

    return shell_of


PHONES = {  # power, heat, memory and idle seconds
    "android_idle": ((True, 100), (38.9, "CPU"), 3514880 * 1024, 2761.2),
    "android_hot": ((False, 18), (78.3, "cpu4-gold-usr"), 701440 * 1024, 0),  # untouched, but lit: a film
    "android_bare": ((True, None), (None, None), None, None),
}


@pytest.mark.parametrize("name", PHONES)
def test_a_recorded_phone(phone, name):
    shell, commands = phone(name)
    found = AdbSensors(shell).read(EVERY_RULE)
    power, heat = (found.charging, found.battery_percent), (found.temperature, found.temperature_sensor)
    assert (power, heat, found.available_bytes, found.idle_seconds) == PHONES[name]
    assert len(commands) == 1


def test_a_reading_that_a_phone_had_and_lacks_now_is_lost(phone):
    """After a restart, Android's shell responds before its services do."""
    shell, _ = phone("android_idle")
    outputs = ["", "all", "", "all"]
    sensors = AdbSensors(lambda line: shell(line) if outputs.pop(0) else "")
    assert [sensors.read().lost for _ in range(4)] == [(), (), READING_NAMES, ()]


class Gone:
    """The sensors of a phone without a cable."""

    def read(self, rules=None):
        raise PhoneUnreachable


def test_an_unreachable_phone_loses_its_readings_and_not_the_hosts(tmp_path):
    host = linux(tmp_path, "jetson_orin_nano.txt", {"busctl --system": "u 1"})
    readings = PhoneWithHost(Gone(), host).read()
    assert readings.model_dump(exclude={"at"}, exclude_none=True) == {"metered": True, "lost": READING_NAMES}


def test_a_shell_without_androids_services_still_tells_memory():
    """This machine's own shell, as an adbd on plain Linux gives it."""
    readings = AdbSensors(lambda line: subprocess.check_output(["sh", "-c", line], text=True)).read()
    assert set(readings.model_dump(exclude={"lost"}, exclude_none=True)) == {"at", "available_bytes"}
    assert 0 < readings.available_bytes <= psutil.virtual_memory().total


@given(st.text())
def test_no_text_makes_a_parser_fail(text):
    for parse in (parse_battery, parse_thermal, parse_power, parse_memory, sections):
        parse(text)
    idle_seconds(text, 2e9, 1e9)
    session_ids(text)
    metered(text)


@pytest.mark.parametrize(
    ("recording", "heat", "power"),
    [
        ("jetson_orin_nano", (61.75, "tj-thermal"), (None, None)),
        ("jetson_nano", (41.5, "AO-therm"), (None, None)),
        ("laptop", (63.125, "k10temp Tctl"), (False, 60)),
    ],
)
def test_a_recorded_linux(tmp_path, recording, heat, power):
    readings = linux(tmp_path, f"{recording}.txt", {"busctl --system": "u 3\n"}).read()
    assert (readings.temperature, readings.temperature_sensor) == heat
    assert (readings.charging, readings.battery_percent) == power
    assert readings.metered is True


@pytest.mark.parametrize(
    ("supplies", "charging", "percent"),
    [
        ("", None, None),
        ("AC/type: Mains|AC/online: 1|B/type: Battery|B/status: Discharging|B/capacity: 50", True, 50),
        ("C/type: USB|C/online: 0", False, None),
        ("C/type: USB|C/online: 1", True, None),
        ("B/type: Battery|B/status: Full|B/capacity: 100", True, 100),
        ("B/type: Battery|B/status: Not charging|B/capacity: 80", True, 80),
        ("B/type: Battery|B/status: Unknown|B/capacity: 80", None, 80),
        ("B/type: Battery|B/status: Charging|B/capacity: 103", True, 100),
        ("AC/type: Mains|AC/online: 0|B/type: Battery|B/status: Full|B/capacity: 100", False, 100),
        ("U/type: UPS|U/status: Discharging|U/capacity: 71", False, 71),
        ("B/type: Battery|B/status: Discharging|B/capacity: broken", False, None),
    ],
)
def test_power(tmp_path, supplies, charging, percent):
    plant(tmp_path, "\n".join(f"sys/class/power_supply/{line}" for line in supplies.split("|") if line))
    assert power(tmp_path) == (charging, percent)


@pytest.mark.parametrize("absurd", [-256.0, -40.0, 0.0, 150.0, 4302.0, float("nan")])
def test_an_absurd_temperature_is_no_temperature(absurd):
    assert hottest({"broken": absurd}) == (None, None)
    assert hottest({"broken": absurd, "cpu": -3.5}) == (-3.5, "cpu")


NOW = 1763719300.0


def test_idle_sessions():
    desktop, terminal = ((RECORDINGS / f"loginctl_{name}.txt").read_text() for name in ("desktop", "terminal"))
    assert idle_seconds(desktop, NOW, 1e9) == 100
    assert idle_seconds(desktop.replace("IdleHint=yes", "IdleHint=no"), NOW, 1e9) == 0
    assert idle_seconds(desktop, NOW - 200, 1e9) == 0  # the clock went back
    assert idle_seconds(terminal, NOW, 1e9) == 9.5
    assert idle_seconds("", NOW, NOW - 500) == 500  # nobody has logged in since boot


def test_logind_is_asked_for_the_rule_only(tmp_path):
    answers = {
        "loginctl list-sessions": "  3 1000 mia seat0 tty2\n c1 120 gdm seat0\n",
        "loginctl show-session": (RECORDINGS / "loginctl_terminal.txt").read_text(),
    }
    sensors = LinuxSensors(tmp_path, lambda command: answers.get(" ".join(command[:2])))
    assert sensors.read(Rules()).idle_seconds is None
    assert sensors.read(EVERY_RULE).idle_seconds == pytest.approx(time.time() - 1763719290.5, abs=60)


def test_without_logind_a_users_terminal_tells(tmp_path, monkeypatch):
    terminal = tmp_path / "dev/pts/7"
    terminal.parent.mkdir(parents=True)
    terminal.touch()
    os.utime(terminal, (time.time() - 3600, time.time()))
    users = [SimpleNamespace(terminal=name) for name in ("pts/7", "gone", None)]
    monkeypatch.setattr(psutil, "users", lambda: users)
    assert LinuxSensors(tmp_path, lambda command: None).read().idle_seconds == pytest.approx(3600, abs=60)


def test_a_program_that_is_not_there_fails_or_hangs_says_nothing(monkeypatch):
    monkeypatch.setattr("device_agent.policy.sensors.ASK_SECONDS", 60)
    assert ask(["mobizo-no-such-program"]) is None
    assert ask(["sh", "-c", "echo words; exit 3"]) is None
    with monkeypatch.context() as patch:
        patch.setattr("device_agent.policy.sensors.ASK_SECONDS", 0.2)
        assert ask(["sleep", "60"]) is None
    assert ask(["printf", r"\377"]) is None
    assert ask(["echo", "words"]) == "words\n"


BURN = "import time\nwhile time.process_time() < 0.35: pass"


def test_our_childrens_time_is_ours_after_they_ended_too():
    before = own_seconds()
    subprocess.run([sys.executable, "-S", "-c", BURN], check=True)
    assert own_seconds() - before >= 0.29


def test_the_batterys_own_heat_counts_and_a_screen_that_a_developer_keeps_lit_is_idle_when_untouched(phone):
    shell, _ = phone("android_hot")
    changes = ((r"\tTemperature.*\n", ""), ("mStayOn=false", "mStayOn=true"))

    def changed(line):
        text = shell(line)
        for pattern, value in changes:
            text = re.sub(pattern, value, text)
        return text

    readings = AdbSensors(changed).read()
    assert (readings.temperature, readings.temperature_sensor) == (41.5, "battery")
    assert readings.idle_seconds == 328.523
