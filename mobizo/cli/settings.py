"""The server, the token and the profile that a command uses, and the origin of each."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mobizo.profiles import DEFAULT_PROFILE, Profile, Profiles, check_name, config_file, read_profiles
from shared.errors import BadRequest

DEFAULT_SERVER = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Setting:
    """A value and a description of its origin. value: None if it is not set; `origin` is the reason then."""

    value: str | None
    origin: str


@dataclass(frozen=True)
class Settings:
    """The settings of a command."""

    profile: Setting
    server: Setting
    token: Setting

    @property
    def url(self) -> str:
        """The server's address."""
        return self.server.value or DEFAULT_SERVER


def resolve_settings(server: str | None, token: str | None, profile: str | None) -> Settings:
    """Returns the settings. Options override environment variables, which override the profile in the file.

    server, token, profile: the options, or None. The option `--profile` is an option, too: what its profile contains
    overrides the environment. Raises BadRequest if the file cannot be read or the named profile does not exist.
    """
    profiles = read_profiles(config_file())
    name, name_origin = choose_profile(profile, profiles)
    profile_values = profiles.profiles.get(name)
    if profile_values is None and name_origin != "default":
        raise BadRequest(f"profile {name!r} ({name_origin}) does not exist; `mobizo login --profile {name}` creates it")
    profile_values = profile_values or Profile()
    origin = f"profile {name}"
    profile_is_option = profile is not None
    server_of_profile = (profile_values.server, origin)
    candidates = _by_precedence(
        (server, "--server"), _from_environment("MOBIZO_SERVER"), server_of_profile, profile_is_option
    )
    address = _first_set(*candidates, (DEFAULT_SERVER, "default"))
    token_of_profile, missing_origin = (profile_values.token, origin), "not set"
    if profile_values.token is not None and _without_slash(profile_values.server) != _without_slash(address.value):
        # A token is never sent to another server than the one that it was stored for.
        token_of_profile, missing_origin = (
            (None, origin),
            f"not set; the token of {origin} is for {profile_values.server}",
        )
    candidates = _by_precedence(
        (token, "--token"), _from_environment("MOBIZO_TOKEN"), token_of_profile, profile_is_option
    )
    return Settings(Setting(name, name_origin), address, _first_set(*candidates, (None, missing_origin)))


def choose_profile(option: str | None, profiles: Profiles) -> tuple[str, str]:
    """Returns a profile's name and its origin: option, MOBIZO_PROFILE, file or default. Raises BadRequest."""
    in_file = profiles.current, "the file"
    setting = _first_set(
        (option, "--profile"), _from_environment("MOBIZO_PROFILE"), in_file, (DEFAULT_PROFILE, "default")
    )
    name = setting.value or DEFAULT_PROFILE
    check_name(name)
    return name, setting.origin


_Candidate = tuple[str | None, str]  # a value, or None, and its origin


def _by_precedence(
    option: _Candidate, variable: _Candidate, stored: _Candidate, profile_is_option: bool
) -> tuple[_Candidate, ...]:
    return (option, stored, variable) if profile_is_option else (option, variable, stored)


def _from_environment(name: str) -> _Candidate:
    return os.environ.get(name) or None, name


def _first_set(*candidates: _Candidate) -> Setting:
    """Returns the first value that is set, or else the last one."""
    return next((Setting(*candidate) for candidate in candidates if candidate[0] is not None), Setting(*candidates[-1]))


def _without_slash(url: str | None) -> str | None:
    return None if url is None else url.rstrip("/")
