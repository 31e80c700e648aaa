"""The server, the token and the profile that a command uses, and where each of them comes from."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mobizo.profiles import DEFAULT_PROFILE, Profile, Profiles, check_name, config_file, read_profiles
from shared.errors import BadRequest

DEFAULT_SERVER = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Setting:
    """A value and its origin in words. value: None if there is none; the origin then says why."""

    value: str | None
    origin: str


@dataclass(frozen=True)
class Settings:
    """What a command uses."""

    profile: Setting
    server: Setting
    token: Setting

    @property
    def url(self) -> str:
        """The server's address."""
        return self.server.value or DEFAULT_SERVER


def resolve(server: str | None, token: str | None, profile: str | None) -> Settings:
    """Returns the settings. Options override environment variables, which override the profile in the file.

    server, token, profile: the options, or None. The option `--profile` is an option, too: what its profile contains
    overrides the environment. Raises BadRequest if the file cannot be read or the named profile does not exist.
    """
    profiles = read_profiles(config_file())
    name, named_by = choose_profile(profile, profiles)
    kept = profiles.profiles.get(name)
    if kept is None and named_by != "default":
        raise BadRequest(f"profile {name!r} ({named_by}) does not exist; `mobizo login --profile {name}` creates it")
    kept = kept or Profile()
    origin = f"profile {name}"
    by_option = profile is not None
    server_of_profile = (kept.server, origin)
    found = _ranked((server, "--server"), _variable("MOBIZO_SERVER"), server_of_profile, by_option)
    address = _first(*found, (DEFAULT_SERVER, "default"))
    token_of_profile, missing = (kept.token, origin), "not set"
    if kept.token is not None and _bare(kept.server) != _bare(address.value):
        # A token is never sent to another server than the one that it was stored for.
        token_of_profile, missing = (None, origin), f"not set; the token of {origin} is for {kept.server}"
    found = _ranked((token, "--token"), _variable("MOBIZO_TOKEN"), token_of_profile, by_option)
    return Settings(Setting(name, named_by), address, _first(*found, (None, missing)))


def choose_profile(option: str | None, profiles: Profiles) -> tuple[str, str]:
    """Returns a profile's name and its origin: option, MOBIZO_PROFILE, file or default. Raises BadRequest."""
    in_file = profiles.current, "the file"
    found = _first((option, "--profile"), _variable("MOBIZO_PROFILE"), in_file, (DEFAULT_PROFILE, "default"))
    name = found.value or DEFAULT_PROFILE
    check_name(name)
    return name, found.origin


_Found = tuple[str | None, str]  # a value, or None, and its origin


def _ranked(option: _Found, variable: _Found, stored: _Found, profile_is_option: bool) -> tuple[_Found, ...]:
    return (option, stored, variable) if profile_is_option else (option, variable, stored)


def _variable(name: str) -> _Found:
    return os.environ.get(name) or None, name


def _first(*found: _Found) -> Setting:
    """Returns the first value that is set, or else the last one."""
    return next((Setting(*pair) for pair in found if pair[0] is not None), Setting(*found[-1]))


def _bare(url: str | None) -> str | None:
    return None if url is None else url.rstrip("/")
