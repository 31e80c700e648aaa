"""Profiles of the `mobizo` command: servers and tokens by name, in one TOML file that only its owner can read."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import platformdirs

from shared.durable import write_durably
from shared.errors import BadRequest

DEFAULT_PROFILE = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HEADER = "# Written by `mobizo login` and `mobizo config`; comments are not kept.\n"


def config_directory() -> Path:
    """Returns the directory of the command's files: $XDG_CONFIG_HOME/mobizo, or the platform's equivalent."""
    return platformdirs.user_config_path("mobizo", appauthor=False)


def config_file() -> Path:
    """Returns the path of the file that contains the profiles."""
    return config_directory() / "config.toml"


@dataclass(frozen=True)
class Profile:
    """A server and the token for it. The token is sent to this server only."""

    server: str | None = None
    token: str | None = None


@dataclass(frozen=True)
class Profiles:
    """The content of the file. current: the profile that is used if no other is named."""

    current: str | None = None
    profiles: dict[str, Profile] = field(default_factory=dict)

    def with_profile(self, name: str, profile: Profile) -> Profiles:
        """Returns a copy in which `profile` has this name. Raises BadRequest for an invalid name."""
        check_name(name)
        return replace(self, profiles=self.profiles | {name: profile})


def check_name(name: str) -> None:
    """Raises BadRequest if `name` cannot name a profile."""
    if not _NAME.fullmatch(name):
        raise BadRequest(f"profile {name!r}: a name has 1 to 64 letters, digits, '-' or '_'")


def read_profiles(path: Path) -> Profiles:
    """Returns the profiles in a file; none if there is no file. Raises BadRequest if the file cannot be used."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return Profiles()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadRequest(f"{path} cannot be read: {error}; correct or remove the file") from error
    sections = document.pop("profile", {})
    current = document.pop("current", None)
    if document or not isinstance(sections, dict) or not isinstance(current, str | None):
        raise BadRequest(f"{path} may contain `current` and tables [profile.NAME] only; correct or remove the file")
    return Profiles(current, {name: _profile(path, name, section) for name, section in sections.items()})


def _profile(path: Path, name: str, section: Any) -> Profile:
    valid = isinstance(section, dict) and all(
        key in ("server", "token") and isinstance(value, str) for key, value in section.items()
    )
    if not valid or not _NAME.fullmatch(name):
        raise BadRequest(f"{path}: [profile.{name}] may contain the texts `server` and `token` only")
    return Profile(section.get("server"), section.get("token"))


def write_profiles(path: Path, profiles: Profiles) -> None:
    """Replaces the file atomically, with mode 0600; creates its directory with mode 0700."""
    lines = [_HEADER]
    if profiles.current is not None:
        lines.append(f"current = {_toml_string(profiles.current)}\n")
    for name, profile in profiles.profiles.items():
        lines.append(f"\n[profile.{name}]\n")
        for key, value in (("server", profile.server), ("token", profile.token)):
            if value is not None:
                lines.append(f"{key} = {_toml_string(value)}\n")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_durably(path, "".join(lines).encode())


def _toml_string(value: str) -> str:
    """Returns a TOML basic string; JSON's escapes are a subset of TOML's."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
