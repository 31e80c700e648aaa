"""The owner's rules and consents, read from `rules.toml` in the agent's home, and the policy evaluator.

The evaluator compares sensor readings with the owner's and the job's rules.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import Field, FiniteFloat, RootModel, StrictBool, StrictInt, ValidationError

from device_agent.durable import read_document, write_document
from device_agent.memory import spare_bytes
from device_agent.policy.rules import Decision, decide, decide_transfer
from device_agent.policy.sensors import Readings, Sensors, local_now
from shared.capabilities import Cohorts
from shared.errors import BadRequest
from shared.federation.secure_aggregation.settings import MAX_MEMBERS
from shared.invalid_fields import first_invalid
from shared.privacy import DELTA
from shared.rules import Rules
from shared.strict_model import StrictModel

Epsilon = Annotated[FiniteFloat, Field(strict=True, ge=0, le=1e3)]
_log = structlog.get_logger()
KEPT_DAYS = 14


class OwnerConsent(StrictModel):
    """The owner's consent to uploads other than the adapters of this device's users, none by default, and the owner's
    limits of privacy spending.
    """

    trajectory: StrictBool = Field(False, description="trajectories of jobs that ask for them")
    cohorts: StrictBool | Cohorts = Field(
        False, description="updates for federated rounds: true for every cohort, or a list of cohorts"
    )
    masked_among: StrictInt = Field(
        0,
        ge=0,
        le=MAX_MEMBERS,
        description="updates only in masked sums of at least this many devices; 0: also unmasked",
    )
    privacy_limit: Epsilon | dict[str, Epsilon] | None = Field(
        None, description="epsilon of all runs on a data set together: of every data set, or by name; null: no limit"
    )
    privacy_delta: float = Field(DELTA, strict=True, gt=0, lt=1, description="delta of `privacy_limit`")

    def privacy_limit_of(self, dataset: str) -> float | None:
        """Returns the epsilon that all runs on a data set may spend, or None if there is no limit."""
        return self.privacy_limit.get(dataset) if isinstance(self.privacy_limit, dict) else self.privacy_limit


def load_rules(path: Path) -> tuple[Rules, OwnerConsent]:
    """Returns the owner's rules and consents in the file; those of a device without any if it does not exist.

    Raises BadRequest that names the key and what is wrong with its value.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8-sig")) if path.exists() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} cannot be read ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{path} is not valid TOML: {error}") from error
    fields = Rules.model_fields | OwnerConsent.model_fields
    for key in document:
        if key not in fields:
            raise BadRequest(f"{path}: {key!r} is not a rule; the rules are {', '.join(fields)}")
    consents = {key: document.pop(key) for key in OwnerConsent.model_fields if key in document}
    try:
        return Rules.model_validate(document), OwnerConsent.model_validate(consents)
    except ValidationError as error:
        invalid = first_invalid(error)
        meaning = fields[str(invalid.location[0])].description
        raise BadRequest(f"{path}: {invalid} ({meaning}); docs/policy.md describes the rules") from error


class PolicyEvaluator:
    """Decides whether this device may train and use the network, from fresh sensor readings."""

    def __init__(
        self, rules: Rules, sensors: Sensors, budget: DailyMinutes, paused: Callable[[], str | None] = lambda: None
    ) -> None:
        """rules: the owner's. paused: returns why training is paused by the user, or None."""
        self.rules = rules
        self._sensors, self._budget, self._paused = sensors, budget, paused
        self._last: Decision | None = None
        self._last_download: Decision | None = None
        self._at: datetime | None = None

    def training(self, rules: Rules, needed: int = 0) -> Decision:
        """Decides whether to train now. rules: all that apply. needed: bytes that training will allocate."""
        readings, pause = self._readings(rules)
        if pause is not None:
            return pause
        spent = self._budget.spent(readings.at.date())
        self._last = decide(rules, readings, spent, self._last, needed_bytes=needed)
        return self._last

    def download(self, rules: Rules) -> Decision:
        """Decides whether to download program files now, by the rules on power, heat and the network.

        rules: all that apply.
        """
        power_and_heat = Rules(
            charging=rules.charging, battery_floor=rules.battery_floor, temperature_ceiling=rules.temperature_ceiling
        )
        readings, pause = self._readings(power_and_heat)
        if pause is not None:
            return pause
        self._last_download = decide(power_and_heat, readings, 0.0, self._last_download)
        return self._last_download if self._last_download.action == "wait" else self.transfer(rules)

    def _readings(self, rules: Rules) -> tuple[Readings, Decision | None]:
        """Returns the sensors' readings, and the decision to wait if the user has paused training."""
        readings, why = self._sensors.read(rules), self._paused()
        self._at = readings.at
        return readings, None if why is None else Decision(action="wait", why=why)

    def transfer(self, rules: Rules) -> Decision:
        """Decides whether to use the network now. rules: all that apply."""
        return Decision(action="train") if rules.metered else decide_transfer(rules, self._sensors.read(rules))

    def seconds_until(self, decision: Decision) -> float:
        """Returns the seconds until a decision to wait may change; 0 if unknown."""
        if decision.until is None or self._at is None:
            return 0.0
        return (decision.until - self._at).total_seconds()

    def spend(self, seconds: float) -> None:
        """Adds training time in seconds to the day's minutes."""
        today = (self._at or local_now()).date()
        try:
            self._budget.add(seconds / 60, today)
        except OSError as error:
            _log.warning("the training minutes could not be written; they count until a restart", detail=str(error))

    def spare_bytes(self, rules: Rules) -> int:
        """Returns the memory available to training beyond what the rules reserve."""
        available = self._sensors.read(rules).available_bytes
        return max((spare_bytes() if available is None else available) - (rules.memory_floor_bytes or 0), 0)


_Minutes = RootModel[dict[str, Annotated[FiniteFloat, Field(strict=True, ge=0)]]]  # by date, YYYY-MM-DD


class DailyMinutes:
    """Minutes trained by date. A damaged file counts as empty: at worst one day's allowance is granted twice."""

    def __init__(self, path: Path) -> None:
        """path: created by the first `add`."""
        self._path = path
        read = read_document(path, _Minutes)
        self._minutes = {} if read is None else read.root

    def spent(self, today: date) -> float:
        """Returns the minutes trained on a day."""
        return self._minutes.get(today.isoformat(), 0.0)

    def add(self, minutes: float, today: date) -> None:
        """Adds minutes measured with a monotonic clock and syncs the file.

        Raises OSError if the disk is full; the minutes then count until this process ends.
        """
        # The latest day moves to the end, so that a clock that was far ahead for a while does not evict real days.
        self._minutes[today.isoformat()] = self._minutes.pop(today.isoformat(), 0.0) + minutes
        self._minutes = dict(list(self._minutes.items())[-KEPT_DAYS:])
        write_document(self._path, _Minutes(self._minutes))
