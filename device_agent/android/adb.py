"""Runs the `adb` binary: devices, shell and push, with an exception for each kind of failure.

Unavailable                 adb is not installed on this machine
|- PhoneUnreachable         the link is down; the run resumes once a phone is reachable
|- PhoneUnsuitable          the phone's system cannot start the runner
`- DoesNotFit               too little storage on the phone
RuntimeFailed               the phone refused a command
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from device_agent.errors import DoesNotFit, RuntimeFailed, Stopped
from shared.errors import Unavailable
from shared.stop_signal import never

SHELL_SECONDS = 30.0  # timeout of a command on the phone
MIN_BYTES_PER_SECOND = 250_000  # of a push; a slower link counts as broken
POLL_SECONDS = 0.1
NO_PHONE = "adb sees no phone: connect one with USB debugging enabled, and check `adb devices`"
UNAUTHORIZED = "the phone does not trust this machine yet: unlock it and accept the USB debugging prompt"
OFFLINE = "adb sees the phone but gets no response: reconnect its cable, or run `adb reconnect offline`"
ADB_MISSING = "adb is not installed on this machine: install it (Debian, Ubuntu: `apt install adb`) or set ANDROID_HOME"
PHONE_FULL = "the phone is out of storage; free some storage on it"

# The serial number of a phone on the network; a restarted adb server must connect to it again.
_NETWORK_SERIAL = re.compile(r"^\S+:\d+$")
_NO_ROOM = "No space left on device"


class PhoneUnreachable(Unavailable, code="phone-away"):
    """The phone is unreachable; check its cable and `adb devices`."""


class PhoneUnsuitable(Unavailable):
    """The phone's system cannot start the runner; use another phone."""


class Adb:
    """One phone behind adb, located again after each failure. Every call may raise Unavailable."""

    def __init__(self, serial: str | None = None, command: Path | None = None) -> None:
        """serial: None if only one phone is connected. command: the adb binary; default: from PATH, then the
        Android SDK.
        """
        self.serial = serial
        self.stop: Callable[[], bool] = never  # polled while adb works; calls raise Stopped once it returns true
        self._command = command
        self._device: str | None = None  # serial number of the phone that responded
        self._last: str | None = None  # the same after the link was lost: preferred among several phones

    def separate(self) -> Adb:
        """Returns another connection to the same phone, with a stop function of its own."""
        return Adb(self.serial, self._command)

    def program(self) -> Path:
        """Returns the adb binary. Raises Unavailable."""
        if self._command is not None:
            if not self._command.is_file():
                raise Unavailable(f"adb is not at {self._command}")
            return self._command
        home = os.environ.get("ANDROID_HOME")
        program = shutil.which("adb") or (home and shutil.which("adb", path=f"{home}/platform-tools"))
        if not program:
            raise Unavailable(ADB_MISSING)
        return Path(program)

    def devices(self) -> dict[str, str]:
        """Returns the state of each phone by serial number: device, offline, unauthorized, or another one of adb."""
        result = self._call(("devices",), SHELL_SECONDS)
        if result.returncode != 0:
            raise _failure(_text(result.stderr), self.serial)
        lines = (line.split("\t") for line in _text(result.stdout).splitlines() if "\t" in line)
        return {fields[0]: fields[1].split(" ")[0] for fields in lines}

    def device(self) -> str:
        """Returns the serial number of a responding phone."""
        if self._device is None:
            self._device = self._last = self._find()
        return self._device

    def shell(self, script: str, seconds: float = SHELL_SECONDS) -> subprocess.CompletedProcess[bytes]:
        """Runs a script in the phone's shell, whatever its exit status.

        After PhoneUnreachable it is unknown how far the script came.
        """
        # adb's exit status does not distinguish a broken link from a failed script; this line ends a complete output.
        mark = secrets.token_hex(8)
        command = f"(\n{script}\n)\nprintf '\\n{mark} %d' $?"
        result = self._call(("-s", self.device(), "shell", "-T", command), seconds)
        out, _, status = result.stdout.rpartition(f"\n{mark} ".encode())
        if not status.isdigit():
            raise self.lost(_text(result.stderr))
        return subprocess.CompletedProcess(script, int(status), out, result.stderr)

    def run(self, script: str, seconds: float = SHELL_SECONDS) -> str:
        """Returns the standard output of a script. Raises DoesNotFit or RuntimeFailed if it fails."""
        result = self.shell(script, seconds)
        if result.returncode != 0:
            output = _text(result.stderr or result.stdout).strip()[-300:]
            if _NO_ROOM in output:
                raise DoesNotFit(f"{PHONE_FULL} ({output})")
            raise RuntimeFailed(f"the phone refused a command with status {result.returncode}: {output}")
        return _text(result.stdout)

    def push(self, local: Path, remote: str) -> None:
        """Copies a file to the phone, not atomically. Raises DoesNotFit or RuntimeFailed."""
        seconds = SHELL_SECONDS + local.stat().st_size / MIN_BYTES_PER_SECOND
        result = self._call(("-s", self.device(), "push", str(local), remote), seconds)
        output = _text(result.stderr) + _text(result.stdout)
        # Some releases of adb exit with status 0 after a remote error.
        refusal = re.search(r"^adb: error: (.*remote .*)$", output, re.MULTILINE)
        if refusal is not None:
            if _NO_ROOM in output:
                raise DoesNotFit(PHONE_FULL)
            raise RuntimeFailed(f"the phone refused: {refusal[1]}")
        if result.returncode != 0:
            raise self.lost(_text(result.stderr))

    def shell_command(self, script: str) -> list[str]:
        """Returns the local command that runs a script in the phone's shell, with binary-safe standard streams and the
        script's exit status; 0 if the link is lost.
        """
        return [str(self.program()), "-s", self.device(), "shell", "-T", script]

    def lost(self, output: str) -> Unavailable:
        """Returns the exception for adb's error message, and locates the phone again at the next call."""
        serial, self._device = self._device, None
        return _failure(output, serial)

    def _find(self) -> str:
        devices = self.devices()
        if self.serial is not None:
            if _NETWORK_SERIAL.match(self.serial) and devices.get(self.serial) != "device":
                # The adb server keeps a broken connection in its list and rarely retries it.
                self._call(("disconnect", self.serial), SHELL_SECONDS)
                self._call(("connect", self.serial), SHELL_SECONDS)
                devices = self.devices()
            if self.serial not in devices:
                serials = ", ".join(devices) or "none"
                raise PhoneUnreachable(
                    f"adb does not see phone {self.serial} (connected: {serials}); connect it and check `adb devices`"
                )
            return _usable(self.serial, devices[self.serial])
        ready = [serial for serial, state in devices.items() if state == "device"]
        if len(ready) > 1:
            if self._last in ready:
                return self._last
            raise PhoneUnreachable(f"adb sees {len(ready)} phones ({', '.join(ready)}); select one with --adb SERIAL")
        if not devices:
            raise PhoneUnreachable(NO_PHONE)
        serial = next(iter(ready or devices))
        return _usable(serial, devices[serial])

    def _call(self, arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[bytes]:
        """Runs adb until it exits, `stop` returns true, or `seconds` have passed."""
        if self.stop():
            raise Stopped
        command = [str(self.program()), *arguments]
        pipe, null_device = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=null_device, stdout=pipe, stderr=pipe)
        deadline = time.monotonic() + seconds
        try:
            while True:
                try:
                    out, err = process.communicate(timeout=POLL_SECONDS)
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
                except subprocess.TimeoutExpired:
                    if self.stop():
                        raise Stopped from None
                    if time.monotonic() > deadline:
                        self._device = None
                        raise PhoneUnreachable(f"adb did not respond within {seconds:.0f} s; check the cable") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()


# By the state of a phone, or by a part of adb's error message.
_REMEDIES = {
    "unauthorized": UNAUTHORIZED,
    "authorizing": UNAUTHORIZED,
    "offline": OFFLINE,
    "connecting": OFFLINE,
    "no devices": NO_PHONE,
    "not found": NO_PHONE,
}


def _usable(serial: str, state: str) -> str:
    """Returns the serial number of a phone in state "device". Raises PhoneUnreachable for one in another state."""
    if state == "device":
        return serial
    if state in _REMEDIES:
        raise PhoneUnreachable(f"phone {serial}: {_REMEDIES[state]}")
    raise PhoneUnreachable(f"phone {serial} is in state '{state}'; start Android on it")


def _failure(output: str, serial: str | None) -> Unavailable:
    """Maps adb's error message to an exception; PhoneUnreachable for transient failures."""
    if "only supports allocating a pty" in output:
        return PhoneUnsuitable(f"{serial or 'phone'}: its adb shell has no binary-safe streams; use Android 7 or later")
    for text, remedy in _REMEDIES.items():
        if text in output:
            return PhoneUnreachable(f"{serial or 'phone'}: {remedy}")
    last = output.strip().splitlines()[-1:] or ["the link broke"]
    return PhoneUnreachable(f"{serial or 'phone'}: {last[0][-300:]}; check its cable and `adb devices`")


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
