"""Creates the agent's systemd unit from the packaged template."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from shared.durable import write_durably
from shared.errors import BadRequest, MobizoError

UNIT = "mobizo-agent.service"
SYSTEM = "@SYSTEM@ "  # before settings of the template that a user's own unit does not have


@dataclass(frozen=True)
class Service:
    """One unit. command: the daemon's command line. account: the user that it runs as. own: for a user's own
    systemd instance.
    """

    command: Sequence[str]
    home: Path
    account: str
    own: bool = False

    @property
    def path(self) -> Path:
        """Path of the unit file."""
        return _user_units() / UNIT if self.own else Path("/etc/systemd/system") / UNIT

    def text(self) -> str:
        """Returns the unit file's text. Raises BadRequest for arguments that a unit cannot contain."""
        values = {
            "EXEC": " ".join(quoted(word.replace("$", "$$")) for word in self.command),
            "HOME": quoted(str(self.home)),
            "ENVIRONMENT": quoted(f"MOBIZO_AGENT_HOME={self.home}"),
            "USER": self.account,
            "TARGET": "default.target" if self.own else "multi-user.target",
        }
        template = files("device_agent").joinpath("systemd", UNIT).read_text("utf-8")
        _, lines = template.split("\n\n", 1)  # drops the template's leading comment
        unit_lines = (line.removeprefix(SYSTEM) for line in lines.splitlines() if not (self.own and SYSTEM in line))
        return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], "\n".join(unit_lines)) + "\n"

    def install(self) -> None:
        """Writes the unit file. Raises MobizoError if that fails."""
        text = self.text()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self.path, text.encode(), 0o644)
        except OSError as error:
            remedy = "run this as root, or install for this user only with --user"
            raise MobizoError(f"{self.path} cannot be written ({error.strerror}); {remedy}") from error

    @property
    def start_hint(self) -> str:
        """The command that enables and starts the unit."""
        if self.own:
            return (
                "systemctl --user daemon-reload && systemctl --user enable --now mobizo-agent && loginctl enable-linger"
            )
        return "sudo systemctl daemon-reload && sudo systemctl enable --now mobizo-agent"


def owner_of(path: Path) -> str:
    """Returns the name of the user that owns `path`."""
    try:
        return path.owner()
    except (FileNotFoundError, KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name


def quoted(word: str) -> str:
    """Returns an argument quoted for a unit file. Raises BadRequest for control characters."""
    if any(ord(letter) < 0x20 for letter in word):
        raise BadRequest(f"{word!r} has a control character, which a systemd unit cannot contain")
    plain = word.replace("%", "%%")
    if re.fullmatch(r"[A-Za-z0-9_./:=@,+%$-]+", plain):
        return plain
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def installed_units() -> list[Path]:
    """Returns the paths of the agent's units on this machine."""
    return [path for path in (Path("/etc/systemd/system") / UNIT, _user_units() / UNIT) if path.is_file()]


def _user_units() -> Path:
    configured = os.environ.get("XDG_CONFIG_HOME")
    return (Path(configured) if configured else Path.home() / ".config") / "systemd" / "user"
