"""Capabilities that a device reports and requirements that a job states. `server.jobs.scheduling` matches them."""

from __future__ import annotations

from typing import Annotated, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import Field, StringConstraints, field_validator

from shared.recipe import Backend
from shared.strict_model import StrictModel

MAX_BYTES = 2**63 - 1  # largest integer of a database column
MAX_COHORTS = 100  # largest number of cohorts in a device's report
NOISE_OPERATOR = "mobizo::noise"  # custom operator of recipes with noise `operator`; the native runner registers it

CohortName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,95}$")]
Cohorts = Annotated[tuple[CohortName, ...], Field(max_length=MAX_COHORTS)]
EngineKind = Literal["native", "python", "adb"]
LabelName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
LabelValue = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,63}$")]
Labels = Annotated[dict[LabelName, LabelValue], Field(max_length=32)]


def may_take_part(cohorts: bool | tuple[str, ...] | None, cohort: str) -> bool:
    """Whether a device takes part in rounds of `cohort`, given its owner's setting `cohorts`. None means no cohort."""
    return cohorts if isinstance(cohorts, bool) else cohort in (cohorts or ())


class Capabilities(StrictModel):
    """Capabilities of a device. A field is null if the device did not report it. Sizes are in bytes."""

    total_bytes: int | None = Field(None, ge=0, le=MAX_BYTES, description="total memory of the machine")
    backends: tuple[Backend, ...] | None = Field(
        None, max_length=20, description="backends whose programs the device can run"
    )
    engines: tuple[EngineKind, ...] | None = Field(
        None, max_length=10, description="engines that can train a program on the device"
    )
    operators: tuple[Annotated[str, StringConstraints(max_length=100)], ...] | None = Field(
        None, max_length=100, description=f"custom operators of its runtime, such as {NOISE_OPERATOR}"
    )
    executorch: str | None = Field(None, max_length=50, description="ExecuTorch release of its runtime")
    battery: bool | None = Field(None, description="whether the device has a battery")
    charging: bool | None = Field(None, description="whether the device is on external power")
    battery_percent: float | None = Field(None, ge=0, le=100)
    cohorts: bool | Cohorts | None = Field(
        None,
        description="cohorts whose rounds the owner allows: all, none or these; null: not reported",
    )

    @field_validator("executorch")
    @classmethod
    def _check_release(cls, version: str | None) -> str | None:
        if version is not None:
            Version(version)
        return version


class Requirements(StrictModel):
    """A job's requirements of its device, in addition to those of its recipe."""

    labels: Labels = Field(
        default_factory=dict, description="labels, set by an operator, that the device must have with these values"
    )
    memory_bytes: int | None = Field(None, ge=0, le=MAX_BYTES, description="minimum total memory of the machine")
    executorch: str | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="condition on the ExecuTorch release of its runtime, such as >=1.5,<2",
    )

    @field_validator("executorch")
    @classmethod
    def _check_condition(cls, text: str | None) -> str | None:
        if text is not None:
            SpecifierSet(text)
        return text
