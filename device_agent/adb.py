"""The stock `adb` binary, driven from outside: devices, shell, push, pull, and each failure in words.

    Unavailable
    |- AdbMissing               no adb on this machine
    |- PhoneAway                the link is down for now; what runs on the phone goes on
    |  |- NoPhone
    |  |- SeveralPhones
    |  |- PhoneUnauthorized
    |  `- PhoneOffline
    `- DoesNotFit
       `- PhoneFull             no room on the phone
    RuntimeFailed
    |- PhoneRefused             the phone answered, and said no
    `- WrongProcessor           the runner is for another kind of processor or system

Knows nothing of runs, files that a phone keeps, or training.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from device_agent.errors import DoesNotFit, RuntimeFailed
from shared.errors import Unavailable

SHELL_SECONDS = 30.0  # most for a command on the phone
SLOWEST = 250_000  # bytes a second; a slower link counts as broken
POLL_SECONDS = 0.1
SDK_VARIABLES = ("ANDROID_HOME", "ANDROID_SDK_ROOT")

# A phone reached over the network is HOST:PORT; a restarted adb server has to be told of it anew.
_NETWORK_SERIAL = re.compile(r"^\S+:\d+$")
_NO_ROOM = "No space left on device"


class AdbMissing(Unavailable):
    """There is no adb on this machine: install it (Debian, Ubuntu: `apt install adb`) or set ANDROID_HOME."""

    code, title = "adb-missing", "adb missing"


class PhoneAway(Unavailable):
    """The phone cannot be reached right now; look at its cable and at `adb devices`."""

    code, title = "phone-away", "Phone away"


class NoPhone(PhoneAway):
    """adb sees no phone: plug one in with USB debugging on, and look at `adb devices`."""

    code, title = "no-phone", "No phone"


class SeveralPhones(PhoneAway):
    """adb sees more than one phone; say which with --adb SERIAL."""

    code, title = "several-phones", "Several phones"


class PhoneUnauthorized(PhoneAway):
    """The phone does not trust this machine yet: unlock it and accept its question about USB debugging."""

    code, title = "phone-unauthorized", "Phone unauthorized"


class PhoneOffline(PhoneAway):
    """adb sees the phone but gets no answer: unplug it and plug it in again, or `adb reconnect offline`."""

    code, title = "phone-offline", "Phone offline"


class PhoneFull(DoesNotFit):
    """The phone has no room; free some storage on it."""

    code, title = "phone-full", "Phone full"


class PhoneRefused(RuntimeFailed):
    """The phone refused a command."""

    code, title = "phone-refused", "Phone refused"


class WrongProcessor(RuntimeFailed):
    """The runner is built for another processor or system than the phone's; see docs/android.md for a build."""

    code, title = "wrong-processor", "Wrong processor"


class Interrupted(Exception):
    """`stop` said so while adb was at work."""


@dataclass(frozen=True)
class Listed:
    """A line of `adb devices`. state: device, offline, unauthorized, or another of adb's words."""

    serial: str
    state: str


@dataclass(frozen=True)
class Done:
    """A command that ended on the phone: its exit status, standard output and standard error."""

    status: int
    out: bytes
    err: str


def never() -> bool:
    """Nobody asks to stop."""
    return False


class Adb:
    """One phone behind adb, found anew after each failure. Every call may raise AdbMissing or PhoneAway."""

    def __init__(self, serial: str | None = None, command: Path | None = None) -> None:
        """serial: None if there is only one phone. command: the adb to use; else PATH's, else the Android SDK's."""
        self.serial = serial
        self.stop: Callable[[], bool] = never  # asked often while adb works; when it says so, calls raise Interrupted
        self.preferred: str | None = None  # the serial to take where there are several and none is named
        self._command = command
        self._device: str | None = None

    def apart(self) -> Adb:
        """The same phone for another part of the agent: what one is told to stop does not interrupt the other."""
        return Adb(self.serial, self._command)

    def program(self) -> Path:
        """The adb that is used. Raises AdbMissing."""
        if self._command is not None:
            if not self._command.is_file():
                raise AdbMissing(f"there is no adb at {self._command}")
            return self._command
        homes = (os.environ[name] for name in SDK_VARIABLES if os.environ.get(name))
        found = shutil.which("adb") or next(
            (path for home in homes if (path := shutil.which("adb", path=str(Path(home) / "platform-tools")))), None
        )
        if found is None:
            raise AdbMissing
        return Path(found)

    def devices(self) -> list[Listed]:
        """What `adb devices` lists."""
        done = self._call(("devices",), SHELL_SECONDS)
        if done.returncode != 0:
            raise _failure(_text(done.stderr), self.serial)
        lines = (line.split("\t") for line in _text(done.stdout).splitlines() if "\t" in line)
        return [Listed(words[0], words[1].split(" ")[0]) for words in lines]

    def device(self) -> str:
        """The serial of a phone that answers. Raises NoPhone, SeveralPhones, PhoneUnauthorized, or PhoneOffline."""
        if self._device is None:
            self._device = self._find()
        return self._device

    def shell(self, script: str, seconds: float = SHELL_SECONDS) -> Done:
        """Runs a script in the phone's shell until it ends; whatever its status.

        Where PhoneAway is raised nobody knows how far the script came.
        """
        # adb's own exit status tells a broken link and a failed script apart badly; this line ends every whole answer.
        mark = secrets.token_hex(8)
        asked = f"(\n{script}\n)\nprintf '\\n{mark} %d' $?"
        done = self._talk(("shell", "-T", asked), seconds)
        out, _, status = done.stdout.rpartition(f"\n{mark} ".encode())
        if not status.isdigit():
            raise self._lost(done)
        return Done(int(status), out, _text(done.stderr))

    def say(self, script: str, seconds: float = SHELL_SECONDS) -> str:
        """The standard output of a script that succeeds. Raises PhoneFull or PhoneRefused if it does not."""
        done = self.shell(script, seconds)
        if done.status != 0:
            told = (done.err or _text(done.out)).strip()[-300:]
            if _NO_ROOM in told:
                raise PhoneFull(f"{PhoneFull.__doc__} ({told})")
            raise PhoneRefused(f"the phone refused, with status {done.status}: {told}")
        return _text(done.out)

    def read(self, remote: str, start: int = 0) -> bytes:
        """A file's bytes from `start` on; empty if there is no such file. For small files."""
        return self.shell(f"tail -c +{start + 1} {remote} 2>/dev/null").out

    def push(self, local: Path, remote: str) -> None:
        """Copies a file to the phone; not whole at once. Raises PhoneFull or PhoneRefused."""
        self._copy(("push", str(local), remote), local.stat().st_size)

    def pull(self, remote: str, local: Path, size: int) -> None:
        """Copies a file of `size` bytes from the phone; not whole at once. Raises PhoneRefused."""
        self._copy(("pull", remote, str(local)), size)

    def shell_command(self, script: str) -> tuple[str, ...]:
        """The command that runs a script on the phone with standard input and output as raw bytes."""
        return (str(self.program()), "-s", self.device(), "shell", "-T", script)

    def pause(self, seconds: float) -> None:
        """Waits. Raises Interrupted as soon as `stop` says so."""
        until = time.monotonic() + seconds
        while True:
            if self.stop():
                raise Interrupted
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, POLL_SECONDS))

    def _copy(self, arguments: Sequence[str], size: int) -> None:
        done = self._talk(arguments, SHELL_SECONDS + size / SLOWEST)
        said = _text(done.stderr) + _text(done.stdout)
        # Some releases end with status 0 after a remote error.
        refused = re.search(r"^adb: error: (.*remote .*)$", said, re.MULTILINE)
        if refused is not None:
            if _NO_ROOM in said:
                raise PhoneFull
            raise PhoneRefused(f"the phone refused: {refused[1]}")
        if done.returncode != 0:
            raise self._lost(done)

    def _find(self) -> str:
        listed = self.devices()
        if self.serial is not None:
            found = next((each for each in listed if each.serial == self.serial), None)
            if _NETWORK_SERIAL.match(self.serial) and (found is None or found.state != "device"):
                found = self._connect(self.serial)
            if found is None:
                others = ", ".join(each.serial for each in listed) or "none"
                raise NoPhone(f"adb sees no phone {self.serial} (but: {others}); plug it in and look at `adb devices`")
            return _usable(found)
        ready = [each for each in listed if each.state == "device"]
        if len(ready) > 1:
            if self.preferred in {each.serial for each in ready}:
                return str(self.preferred)
            names = ", ".join(each.serial for each in ready)
            raise SeveralPhones(f"adb sees {len(ready)} phones ({names}); say which with --adb SERIAL")
        if not listed:
            raise NoPhone
        return _usable(ready[0] if ready else listed[0])

    def _connect(self, serial: str) -> Listed | None:
        # A connection that broke stays in the server's list, and it tries again rarely.
        self._call(("disconnect", serial), SHELL_SECONDS)
        self._call(("connect", serial), SHELL_SECONDS)
        return next((each for each in self.devices() if each.serial == serial), None)

    def _talk(self, arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[bytes]:
        return self._call(("-s", self.device(), *arguments), seconds)

    def _lost(self, done: subprocess.CompletedProcess[bytes]) -> Unavailable:
        serial, self._device = self._device, None
        return _failure(_text(done.stderr), serial)

    def _call(self, arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[bytes]:
        """Runs adb until it ends, `stop` says so, or `seconds` are over."""
        command = [str(self.program()), *arguments]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=nothing, stdout=pipe, stderr=pipe)
        deadline = time.monotonic() + seconds
        try:
            while True:
                try:
                    out, err = process.communicate(timeout=POLL_SECONDS)
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
                except subprocess.TimeoutExpired:
                    if self.stop():
                        raise Interrupted from None
                    if time.monotonic() > deadline:
                        self._device = None
                        raise PhoneAway(f"adb gave no answer within {seconds:.0f} s; look at the cable") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()


def _usable(found: Listed) -> str:
    if found.state == "device":
        return found.serial
    if found.state in ("unauthorized", "authorizing"):
        raise PhoneUnauthorized(f"phone {found.serial}: {_remedy(PhoneUnauthorized)}")
    if found.state in ("offline", "connecting"):
        raise PhoneOffline(f"phone {found.serial}: {_remedy(PhoneOffline)}")
    raise PhoneAway(f"phone {found.serial} is in the state '{found.state}'; start Android on it")


def _remedy(error: type[Unavailable]) -> str:
    return str(error.__doc__)


_WORDS: tuple[tuple[str, type[Unavailable]], ...] = (
    ("unauthorized", PhoneUnauthorized),
    ("offline", PhoneOffline),
    ("more than one", SeveralPhones),
    ("no devices", NoPhone),
    ("not found", NoPhone),
)


def _failure(said: str, serial: str | None) -> Unavailable:
    """The error that adb's own words mean; PhoneAway for all that may pass by itself."""
    for words, error in _WORDS:
        if words in said:
            return error(f"{serial or 'phone'}: {_remedy(error)}")
    told = said.strip().splitlines()[-1:] or ["the link broke"]
    return PhoneAway(f"{serial or 'phone'}: {told[0][-300:]}; look at its cable and at `adb devices`")


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
