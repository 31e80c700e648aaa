"""Reads the owner's rules and consents from `rules.toml` in the agent's home."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError

from device_agent.policy.privacy_ledger import PrivacyLimits
from shared.capabilities import MOST_COHORTS, Cohorts
from shared.errors import BadRequest
from shared.federation.secure_aggregation.settings import MOST_MEMBERS
from shared.privacy import DELTA
from shared.rules import Rules

# Valid values of each key, for error messages.
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
# Keys for the owner only, which jobs cannot set.
CONSENTS = {
    "trajectory": "true or false",
    "cohorts": f"true, false or a list of up to {MOST_COHORTS} cohorts' names",
    "masked_among": f"a number of devices, 3 to {MOST_MEMBERS}, or 0",
    "privacy_limit": "an epsilon from 0 to 1000, or a table of them such as { reviews = 3, tickets = 8 }",
    "privacy_delta": "a number between 0 and 1, such as 1e-5",
}


Epsilon = Annotated[float, Field(strict=True, ge=0, le=1e3, allow_inf_nan=False)]


class OwnerConsent(BaseModel):
    """The owner's consent to uploads other than the adapters of this device's users, none by default, and the owner's
    limits of privacy spending.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    trajectory: StrictBool = Field(False, description="trajectories of jobs that ask for them")
    cohorts: StrictBool | Cohorts = Field(
        False, description="updates for federated rounds: true for every cohort, or a list of cohorts"
    )
    masked_among: StrictInt = Field(
        0,
        ge=0,
        le=MOST_MEMBERS,
        description="updates only in masked sums of at least this many devices; 0: also unmasked",
    )
    privacy_limit: Epsilon | dict[str, Epsilon] | None = Field(
        None, description="epsilon of all runs on a data set together: of every data set, or by name; null: no limit"
    )
    privacy_delta: float = Field(DELTA, strict=True, gt=0, lt=1, description="delta of `privacy_limit`")

    @property
    def privacy_limits(self) -> PrivacyLimits:
        """The limits of privacy spending."""
        return PrivacyLimits(epsilon=self.privacy_limit, delta=self.privacy_delta)


def load_rules(path: Path) -> Rules:
    """Returns the rules in the file, or none if it does not exist. Raises BadRequest that names the key and its
    valid values.
    """
    document = _read(path)
    try:
        return Rules.model_validate({key: value for key, value in document.items() if key in ALLOWED})
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise BadRequest(f"{path}: {key} must be {ALLOWED[key]}") from error


def load_consents(path: Path) -> OwnerConsent:
    """Returns the owner's consents in the file. Raises BadRequest like `load_rules`."""
    document = {key: value for key, value in _read(path).items() if key in CONSENTS}
    try:
        return OwnerConsent.model_validate(document)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise BadRequest(f"{path}: {key} must be {CONSENTS[key]}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} cannot be read ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{path} is not valid TOML: {error}") from error
    for key in document:
        if key not in ALLOWED | CONSENTS:
            raise BadRequest(f"{path}: {key!r} is not a rule; the rules are {', '.join(ALLOWED | CONSENTS)}")
    return document
