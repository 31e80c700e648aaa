"""The systemd unit of the agent: the shipped one, with this device's words in its places. Knows no daemon."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from shared.errors import BadRequest, MobizoError

UNIT = "mobizo-agent.service"

# What only the system's manager can do: a user's own has no right to mount, drop capabilities or change users.
SYSTEM_ONLY = frozenset(
    {
        "AmbientCapabilities",
        "CapabilityBoundingSet",
        "PrivateTmp",
        "ProtectClock",
        "ProtectControlGroups",
        "ProtectHostname",
        "ProtectKernelLogs",
        "ProtectKernelModules",
        "ProtectKernelTunables",
        "ProtectSystem",
        "ReadWritePaths",
        "User",
    }
)


@dataclass(frozen=True)
class Service:
    """One unit. command: the daemon's words. account: the user it runs as. own: of a user's own manager."""

    command: Sequence[str]
    home: Path
    account: str
    own: bool = False

    @property
    def path(self) -> Path:
        """Where the unit belongs."""
        return _user_units() / UNIT if self.own else Path("/etc/systemd/system") / UNIT

    def text(self) -> str:
        """The unit. Raises BadRequest for words that no unit can hold."""
        places = {
            "EXEC": " ".join(quoted(word.replace("$", "$$")) for word in self.command),
            "HOME": quoted(str(self.home)),
            "ENVIRONMENT": quoted(f"MOBIZO_AGENT_HOME={self.home}"),
            "USER": self.account,
            "TARGET": "default.target" if self.own else "multi-user.target",
        }
        shipped = files("device_agent").joinpath("systemd", UNIT).read_text("utf-8")
        _, lines = shipped.split("\n\n", 1)  # the shipped file's own comment stays behind
        kept = (line for line in lines.splitlines() if not self.own or line.partition("=")[0] not in SYSTEM_ONLY)
        return re.sub(r"@([A-Z]+)@", lambda place: places[place[1]], "\n".join(kept)) + "\n"

    def install(self) -> None:
        """Writes the unit. Raises MobizoError if it cannot be written there."""
        text = self.text()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside = self.path.with_name(UNIT + ".new")
            aside.write_text(text)
            aside.chmod(0o644)
            aside.replace(self.path)
        except OSError as error:
            way = "run this as root, or install for yourself alone with --user"
            raise MobizoError(f"{self.path} cannot be written ({error.strerror}); {way}") from error

    @property
    def start_hint(self) -> str:
        """What starts the unit now and with every boot."""
        if self.own:
            return (
                "systemctl --user daemon-reload && systemctl --user enable --now mobizo-agent && loginctl enable-linger"
            )
        return "sudo systemctl daemon-reload && sudo systemctl enable --now mobizo-agent"


def owner_of(path: Path) -> str:
    """The name of the user whose `path` is."""
    try:
        return path.owner()
    except (FileNotFoundError, KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name


def quoted(word: str) -> str:
    """A word as a unit's line takes it: nothing in it is a specifier or the word's end. Raises BadRequest."""
    if any(ord(letter) < 0x20 for letter in word):
        raise BadRequest(f"{word!r} has a control character, which no systemd unit can hold")
    plain = word.replace("%", "%%")
    if re.fullmatch(r"[A-Za-z0-9_./:=@,+%$-]+", plain):
        return plain
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def installed_units() -> list[Path]:
    """The agent's units on this machine."""
    return [path for path in (Path("/etc/systemd/system") / UNIT, _user_units() / UNIT) if path.is_file()]


def _user_units() -> Path:
    configured = os.environ.get("XDG_CONFIG_HOME")
    return (Path(configured) if configured else Path.home() / ".config") / "systemd" / "user"
