"""The owner's rules of one device: `rules.toml` in the agent's home. Knows no sensor."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError

from shared.capabilities import MOST_COHORTS, Cohorts
from shared.errors import BadRequest
from shared.masking.settings import MOST_MEMBERS
from shared.rules import Rules

# What may be said of each key, for whoever said something else.
ALLOWED = {
    "charging": "true or false",
    "battery_floor": "a percentage from 0 to 100",
    "temperature_ceiling": "degrees Celsius above 0 and up to 150",
    "memory_floor_bytes": "a number of bytes, such as 1_000_000_000",
    "idle": "true or false",
    "hours": 'up to 24 spans such as { start = "22:00", end = "06:00" }, local time without a zone',
    "metered": "true or false",
    "daily_minutes": "minutes from 0 to 1440",
}
# What the owner alone says, and no job.
CONSENTS = {
    "trajectory": "true or false",
    "cohorts": f"true, false or a list of up to {MOST_COHORTS} cohorts' names",
    "masked_among": f"a number of devices, 3 to {MOST_MEMBERS}, or 0",
}


class Consents(BaseModel):
    """What may leave this device beyond its own users' adapters. Nothing does unless the owner says so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trajectory: StrictBool = Field(False, description="trajectories of jobs that ask for them")
    cohorts: StrictBool | Cohorts = Field(
        False, description="updates for a cohort's rounds: of every cohort, of none, or of these"
    )
    masked_among: StrictInt = Field(
        0, ge=0, le=MOST_MEMBERS, description="only in sums of at least so many devices; 0: unmasked, too"
    )


def load_rules(path: Path) -> Rules:
    """The rules in the file; none if there is no file. Raises BadRequest naming the key and what may be said."""
    found = _read(path)
    try:
        return Rules.model_validate({key: value for key, value in found.items() if key in ALLOWED})
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise BadRequest(f"{path}: {key} must be {ALLOWED[key]}") from error


def load_consents(path: Path) -> Consents:
    """What the owner has agreed to in the file. Raises BadRequest as `load_rules` does."""
    found = {key: value for key, value in _read(path).items() if key in CONSENTS}
    try:
        return Consents.model_validate(found)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise BadRequest(f"{path}: {key} must be {CONSENTS[key]}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} cannot be read ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{path} is not TOML: {error}") from error
    for key in found:
        if key not in ALLOWED | CONSENTS:
            raise BadRequest(f"{path}: {key!r} is no rule; the rules are {', '.join(ALLOWED | CONSENTS)}")
    return found
