"""The needs of a job, and whether a device satisfies them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import Field

from server.identity.devices.repository import Device, DeviceReport
from shared.capabilities import NOISE_OPERATOR, Capabilities, Labels, may_take_part
from shared.job import JobRequest
from shared.program import ProgramManifest
from shared.recipe import REVERSE_ESTIMATORS, Backend, RequestedRecipe
from shared.strict_model import StrictModel


class Needs(StrictModel):
    """Requirements for a device; a field that is left out requires nothing. Sizes in bytes."""

    labels: Labels = Field({})
    total_bytes: int | None = None  # required by the job
    program_bytes: int | None = None  # weights and planned memory, where too little would only be declined
    backend: Backend | None = None
    operator: str | None = None
    executorch: str | None = None  # that the program was made with; an older runtime may not know its format
    executorch_asked: str | None = None  # conditions that the job states
    charging: bool = False
    battery_floor: float | None = None
    start_user: str | None = None  # whose adapter the job starts from, if another user's
    cohort: str | None = None  # whose round the job is of: its device's owner must have agreed to take part


@dataclass(frozen=True)
class DeviceOffer:
    """A device that requests a job. memory_bytes: memory it can spare.

    lease_seconds: duration of its lease without a heartbeat; None: the server's setting.
    """

    tenant: str
    device_id: str
    users: frozenset[str]  # bound to it
    datasets: frozenset[str]
    memory_bytes: int | None = None
    capabilities: Capabilities | None = None
    labels: Labels = field(default_factory=dict)
    declined: frozenset[str] = frozenset()  # ids of recipes that it had too little memory for
    cooling_down: bool = False  # after too many failures in a row
    may_hold: bool = False  # has a lease, or an expired one that it may resume
    lease_seconds: float | None = None

    @classmethod
    def reported(cls, device: Device, report: DeviceReport, users: Iterable[str]) -> DeviceOffer:
        """Returns the offer of a device by its latest report. users: bound to it."""
        return cls(
            device.tenant,
            device.id,
            frozenset(users),
            frozenset(report.datasets),
            report.memory_bytes,
            report.capabilities,
            device.labels.root,
        )


@lru_cache(maxsize=4096)
def parse_needs(text: str) -> Needs:
    """Parses the needs of a lane, which never change."""
    return Needs.model_validate_json(text)


def needs_of(
    request: JobRequest,
    recipe: RequestedRecipe,
    manifest: ProgramManifest | None,
    cohort: str | None = None,
    start_user: str | None = None,
) -> Needs:
    """Returns the needs of a job, from its request, its recipe, and its program if it is compiled.

    cohort: the cohort of the job's round. start_user: whose adapter the job starts from, if another user's.
    """
    requirements, rules = request.requires, request.rules
    # Otherwise a device with too little memory declines; the job changes, or fails if only this device may train it.
    may_change = request.recipe.estimator == "auto" and recipe.estimator in REVERSE_ESTIMATORS
    fits_or_waits = manifest is not None and not may_change and request.device is None
    made_by_executorch = manifest is not None and recipe.backend != "torch"
    return Needs(
        labels=requirements.labels,
        total_bytes=requirements.memory_bytes,
        program_bytes=manifest.training_bytes if manifest is not None and fits_or_waits else None,
        backend=recipe.backend,
        operator=NOISE_OPERATOR if recipe.noise == "operator" else None,
        executorch=manifest.executorch if manifest is not None and made_by_executorch else None,
        executorch_asked=requirements.executorch,
        charging=rules.charging,
        battery_floor=rules.battery_floor,
        cohort=cohort,
        start_user=start_user,
    )


def can_run(needs: Needs, offer: DeviceOffer) -> bool:
    """Returns whether a device satisfies these needs."""
    return next(lacks(needs, offer), None) is None


def lacks(needs: Needs, offer: DeviceOffer) -> Iterator[str]:
    """Yields what a device lacks, each as the object of "lacks": "label site=lab".

    A device that reports no capabilities is assumed to have those of every agent, and nothing that jobs require
    explicitly.
    """
    can = offer.capabilities or Capabilities.model_validate({})
    for name, value in needs.labels.items():
        if offer.labels.get(name) != value:
            yield f"label {name}={value}"
    if needs.start_user is not None and needs.start_user not in offer.users:
        yield f"user {needs.start_user!r}, whose adapter the job starts from (`mobizo device bind`)"
    if needs.cohort is not None and not may_take_part(can.cohorts, needs.cohort):
        yield f"its owner's permission to take part in cohort {needs.cohort} (`cohorts` in the agent's rules.toml)"
    yield from _memory(needs, offer, can)
    if needs.backend is not None and can.backends is not None and needs.backend not in can.backends:
        yield f"backend {needs.backend}"
    if needs.operator is not None and needs.operator not in (can.operators or ()):
        yield f"operator {needs.operator}, which the native runner brings"
    if _older(can.executorch, needs.executorch):
        yield f"ExecuTorch {needs.executorch} or later"
    if needs.executorch_asked is not None and not (
        can.executorch is not None
        and SpecifierSet(needs.executorch_asked).contains(Version(can.executorch), prereleases=True)
    ):
        yield f"ExecuTorch {needs.executorch_asked}"
    yield from _power(needs, can)


def _memory(needs: Needs, offer: DeviceOffer, can: Capabilities) -> Iterator[str]:
    if needs.total_bytes is not None and (can.total_bytes is None or can.total_bytes < needs.total_bytes):
        yield f"{needs.total_bytes:,} bytes of memory"
    # Devices that report no capabilities may decline, and are offered the job again when they have more memory.
    spare_bytes = None if offer.capabilities is None else offer.memory_bytes
    if needs.program_bytes is not None and spare_bytes is not None and spare_bytes < needs.program_bytes:
        yield f"{needs.program_bytes:,} bytes of memory to spare, which its program takes"


def _older(version: str | None, least: str | None) -> bool:
    if version is None or least is None:
        return False
    try:
        return Version(version) < Version(least)
    except InvalidVersion:
        return False  # the program was made by a build without a version number


def _power(needs: Needs, can: Capabilities) -> Iterator[str]:
    if can.charging is not False:
        return
    if needs.charging:
        yield "external power now"
    elif (
        needs.battery_floor is not None
        and can.battery_percent is not None
        and can.battery_percent < needs.battery_floor
    ):
        yield f"external power now, or its battery at {needs.battery_floor:g} %"
