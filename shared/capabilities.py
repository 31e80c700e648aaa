"""What a device can do, as it tells itself, and what a job may ask of the device that trains it.

Knows no matching: that is `server.queue.matching`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from shared.recipe import Backend
from shared.versions import conditions, release

MOST_BYTES = 2**63 - 1  # that a database holds
MOST_COHORTS = 100  # that a device names
NOISE_OPERATOR = "mobizo::noise"  # what a recipe with noise `operator` calls; the native runner registers it

CohortName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,95}$")]
Cohorts = Annotated[tuple[CohortName, ...], Field(max_length=MOST_COHORTS)]
EngineKind = Literal["native", "python", "adb"]
LabelName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
LabelValue = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,63}$")]
Labels = Annotated[dict[LabelName, LabelValue], Field(max_length=32)]


def may_take_part(cohorts: bool | tuple[str, ...] | None, cohort: str) -> bool:
    """Whether a device whose owner has said `cohorts` takes part in rounds of `cohort`; None: nothing was said."""
    return cohorts if isinstance(cohorts, bool) else cohort in (cohorts or ())


class Capabilities(BaseModel):
    """What a device can do; null where it does not say. Sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    total_bytes: int | None = Field(None, ge=0, le=MOST_BYTES, description="memory of the machine")
    backends: tuple[Backend, ...] | None = Field(None, max_length=20, description="whose programs it can run")
    engines: tuple[EngineKind, ...] | None = Field(None, max_length=10, description="what may train a program there")
    operators: tuple[str, ...] | None = Field(
        None, max_length=100, description=f"that its runtime has beside ExecuTorch's own, such as {NOISE_OPERATOR}"
    )
    executorch: str | None = Field(None, max_length=50, description="release of its runtime")
    battery: bool | None = Field(None, description="whether it has one")
    charging: bool | None = Field(None, description="on external power now")
    battery_percent: float | None = Field(None, ge=0, le=100)
    cohorts: bool | Cohorts | None = Field(
        None,
        description="whose rounds its owner lets it take part in: all, none or these; null: it knows no rounds",
    )

    @field_validator("executorch")
    @classmethod
    def _is_a_release(cls, version: str | None) -> str | None:
        if version is not None:
            release(version)
        return version

    @field_validator("operators")
    @classmethod
    def _are_short(cls, operators: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if any(len(name) > 100 for name in operators or ()):
            raise ValueError("an operator's name has at most 100 characters")
        return operators


class Requirements(BaseModel):
    """What a job asks of its device beyond what its recipe needs anyway."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    labels: Labels = Field(default_factory=dict, description="that an operator gave the device, each with this value")
    memory_bytes: int | None = Field(None, ge=0, le=MOST_BYTES, description="the least that the machine has")
    executorch: str | None = Field(None, max_length=100, description="of its runtime's release, such as >=1.5,<2")

    @field_validator("executorch")
    @classmethod
    def _is_understood(cls, text: str | None) -> str | None:
        if text is not None:
            conditions(text)
        return text
